"""The interface between the simulator and a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from falaj.records.scheduling.snapshot import Decision, Reason, Request, Snapshot

Scheduler = Callable[[Snapshot], Iterable[Decision]]

PERMANENT_REASONS = frozenset(
    {Reason.BUDGET, Reason.CORDONED, Reason.TOPOLOGY, Reason.RESIDENCY, Reason.TOO_LARGE, Reason.NO_QUEUE},
)
"""Reasons that waiting does not resolve: such jobs do not count in the backlog of a queue."""


class SchedulingPolicy(Protocol):
    """Decides for the simulator. It is notified of jobs that begin and stop waiting.

    Its snapshots have no pending jobs.
    """

    def job_added(self, request: Request) -> None: ...

    def job_removed(self, request: Request) -> None: ...

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]: ...


class SnapshotPolicy:
    """Adapts a scheduler that is a function of a snapshot with the pending jobs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[str, Request] = {}

    def job_added(self, request: Request) -> None:
        self._waiting[request.job] = request

    def job_removed(self, request: Request) -> None:
        del self._waiting[request.job]

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        return list(self._scheduler(snapshot.model_copy(update={"pending": tuple(self._waiting.values())})))
