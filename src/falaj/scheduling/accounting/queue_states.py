"""The state of queues: resources held and borrowed, jobs, share, history and score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from falaj.ports.metadata import Transaction
from falaj.records.scheduling.accounting import Amounts, QueueSettings, QueueState
from falaj.records.scheduling.snapshot import Queue, Quota
from falaj.scheduling import store
from falaj.scheduling.accounting import attempts
from falaj.scheduling.accounting.accounts import QueueAccounts
from falaj.scheduling.accounting.decayed_usage import ResourceAverages
from falaj.scheduling.capacity.resources import dominant_share
from falaj.scheduling.dependencies import JobFigures
from falaj.scheduling.queue_tree import children_of, summed


class QueueCounts(NamedTuple):
    """Resources and job counts of a queue."""

    held: ResourceAverages = ResourceAverages()
    running: int = 0
    waiting: int = 0

    def plus(self, other: QueueCounts) -> QueueCounts:
        return QueueCounts(
            self.held.plus(other.held), self.running + other.running, self.waiting + other.waiting
        )


def queue_states(
    tx: Transaction,
    accounts: QueueAccounts,
    jobs: JobFigures,
    *,
    now: datetime,
    workspaces: Mapping[str, str],
) -> list[QueueState]:
    """Return the state of every queue by name; only workspaces in `workspaces` (id to name) are shown."""
    stored = store.all_queues(tx)
    queues = {name: each.queue for name, each in stored.items()}
    figures = summed(_own(tx, jobs), queues, zero=QueueCounts(), plus=QueueCounts.plus)
    past, whole = accounts.histories(tx, queues, now=now), accounts.whole()
    return [
        _state(each, figures[name], past[name], whole, queues=queues, workspaces=workspaces)
        for name, each in stored.items()
    ]


def settings_of(found: store.StoredQueue, workspaces: Sequence[str]) -> QueueSettings:
    queue = found.queue
    return QueueSettings(
        name=queue.name,
        quota=queue.quota,
        limit=queue.limit,
        parent=queue.parent,
        weight=queue.weight,
        workspaces=tuple(sorted(workspaces)),
        version=found.version,
    )


def _own(tx: Transaction, jobs: JobFigures) -> dict[str, QueueCounts]:
    """Return the counts of each queue without those below it."""
    own: dict[str, QueueCounts] = {
        queue: QueueCounts(running=running, waiting=waiting)
        for queue, (running, waiting) in jobs.unfinished_in_queues(tx).items()
    }
    for queue, span in attempts.running_spans(tx):
        own[queue] = own.get(queue, QueueCounts()).plus(QueueCounts(span.held))
    return own


def _state(
    found: store.StoredQueue,
    figures: QueueCounts,
    history: float,
    whole: ResourceAverages,
    *,
    queues: Mapping[str, Queue],
    workspaces: Mapping[str, str],
) -> QueueState:
    named = [workspaces[ident] for ident in found.workspaces if ident in workspaces]
    share = dominant_share(figures.held, whole)
    return QueueState(
        settings=settings_of(found, named),
        held=_amounts(figures.held),
        borrowed=_borrowed(figures.held, found.queue.quota),
        running=figures.running,
        waiting=figures.waiting,
        share=share,
        history=history,
        score=(share + history) / found.queue.weight,
        unseen=len(found.workspaces) - len(named),
        children=tuple(children_of(found.name, queues.values())),
    )


def _amounts(held: ResourceAverages) -> Amounts:
    return Amounts(cpus=int(held.cpus), gpus=held.gpus, memory_bytes=int(held.memory_bytes))


def _borrowed(held: ResourceAverages, quota: Quota) -> Amounts:
    """Return what is held beyond the quota; nothing for a resource without a quota."""
    own = ResourceAverages(
        *(
            float("inf") if figure is None else figure
            for figure in (quota.cpus, quota.gpus, quota.memory_bytes)
        )
    )
    return _amounts(ResourceAverages(*(max(has - may, 0.0) for has, may in zip(held, own, strict=True))))
