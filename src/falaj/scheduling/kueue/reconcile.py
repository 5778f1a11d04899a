"""Keeps the objects of Kueue as the queues say: soon after queues, workspaces or nodes changed, and now and then."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable

from falaj.records.scheduling.kueue import QueueSync
from falaj.scheduling.kueue.render import SharedQueue
from falaj.scheduling.kueue.sync import KueueCluster

log = logging.getLogger("falaj.controller")

LOOK_S = 10.0
"""The queues are rendered this often, which asks the cluster nothing."""
COMPARE_S = 300.0
"""The cluster is compared this often, for what others changed there: one request for each object."""
WAITING_S = 30.0
"""The same while a namespace is missing."""


class QueueReconciler:
    """Compares the queues with the cluster, and applies them if something differs.

    `shared` returns the queues, and `apply` is the operation that makes the cluster so: what it changes is recorded.
    """

    def __init__(
        self,
        cluster: KueueCluster,
        shared: Callable[[], Iterable[SharedQueue]],
        apply: Callable[[], QueueSync],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._shared, self._apply, self._clock = cluster, shared, apply, clock
        self._look_at = self._compare_at = float("-inf")
        self._rendered: str | None = None
        self._left: tuple[str, ...] = ()

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._look_at

    def step(self) -> QueueSync | None:
        """Make the cluster as the queues say; return what was changed, none if nothing was."""
        self._look_at = self._clock() + LOOK_S
        shared = list(self._shared())
        rendered = json.dumps(self._cluster.render(shared).manifests, sort_keys=True)
        if rendered == self._rendered and self._clock() < self._compare_at:
            return None
        found = self._cluster.diff(shared).objects
        differs = any(each.state in ("missing", "changed", "extra") for each in found)
        done = self._apply() if differs else None
        self._rendered = rendered
        waits = any(each.state == "waiting" for each in found)
        self._compare_at = self._clock() + (WAITING_S if waits else COMPARE_S)
        self._report([f"{each.kind} {each.name}" for each in found if each.state == "foreign"], done)
        return done

    def _report(self, foreign: list[str], done: QueueSync | None) -> None:
        if done is not None:
            changed = [f"{each.kind} {each.name} ({each.state})" for each in done.changed]
            log.info("queues of the cluster changed", extra={"objects": changed})
        if tuple(foreign) != self._left:
            self._left = tuple(foreign)
            log.warning("objects of others have the names of queues", extra={"objects": foreign})
