"""The most that the jobs of a workspace can hold together, from the limits of the queues that it may use. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from falaj.records.names import ObjectId
from falaj.records.scheduling.snapshot import Queue, Quota
from falaj.scheduling.accounting.accounts import DEFAULT
from falaj.scheduling.queue_tree import RESOURCES, ancestry
from falaj.scheduling.store import StoredQueue


def workspace_limits(workspace: ObjectId, known: Mapping[str, StoredQueue]) -> Quota:
    """Return the sum of the limits of the queues that a workspace may use; no bound where one of them has none."""
    queues = {name: each.queue for name, each in known.items()}
    queues.setdefault(DEFAULT, Queue(name=DEFAULT))
    usable = [
        name
        for name in queues
        if (each := known.get(name)) is None or not each.workspaces or workspace in each.workspaces
    ]
    return Quota(**{field: _total(field, usable, queues) for field in RESOURCES})


def _total(field: str, usable: list[str], queues: Mapping[str, Queue]) -> int | None:
    bounds = [_bound(field, name, queues) for name in usable]
    return None if None in bounds else sum(each for each in bounds if each is not None)


def _bound(field: str, name: str, queues: Mapping[str, Queue]) -> int | None:
    """Return the smallest limit of a queue and of those above it."""
    own = [queues[each] for each in ancestry(name, queues)]
    limits = [getattr(each.quota if each.limit is None else each.limit, field) for each in own]
    return min((each for each in limits if each is not None), default=None)
