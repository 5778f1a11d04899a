"""Whom the simulator asks what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from falaj.records.scheduling.snapshot import Decision, Reason, Request, Snapshot

Scheduler = Callable[[Snapshot], Iterable[Decision]]

PERMANENT_REASONS = frozenset(
    {Reason.BUDGET, Reason.TOPOLOGY, Reason.RESIDENCY, Reason.TOO_LARGE, Reason.NO_QUEUE},
)
"""What does not pass by waiting: a job that waits for it counts in no queue's backlog."""


class SchedulingPolicy(Protocol):
    """Told of every job that comes to wait and of every one that does so no more, so that it need not be told again.

    The snapshot that it decides about has nobody pending.
    """

    def job_added(self, request: Request) -> None: ...

    def job_removed(self, request: Request) -> None: ...

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]: ...


class SnapshotPolicy:
    """A scheduler that is a function of the whole snapshot."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[str, Request] = {}

    def job_added(self, request: Request) -> None:
        self._waiting[request.job] = request

    def job_removed(self, request: Request) -> None:
        del self._waiting[request.job]

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        return list(self._scheduler(snapshot.model_copy(update={"pending": tuple(self._waiting.values())})))
