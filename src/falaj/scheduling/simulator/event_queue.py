"""The virtual clock and its queue of events."""

from __future__ import annotations

from datetime import datetime
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from falaj.scheduling.simulator.simulated_job import SimulatedJob


class JobArrival(NamedTuple):
    case: SimulatedJob


class JobEnd(NamedTuple):
    """The job has finished or reached its time limit. Ignored if it was stopped since (`turn` differs)."""

    case: SimulatedJob
    turn: int


class GraceEnd(NamedTuple):
    """The grace period of a preempted job is over."""

    case: SimulatedJob
    turn: int


class NodeLoss(NamedTuple):
    node: str


class NodeReturn(NamedTuple):
    node: str


class DecisionDue(NamedTuple):
    """A deferred scheduling round is due."""


Event = JobArrival | JobEnd | GraceEnd | NodeLoss | NodeReturn | DecisionDue


class EventQueue:
    """Future events ordered by time, then by the order in which they were added."""

    def __init__(self, begin: datetime) -> None:
        self.now = begin
        self._heap: list[tuple[datetime, int, Event]] = []
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def at(self, moment: datetime, event: Event) -> None:
        if moment < self.now:
            raise ValueError(f"{event} is scheduled for {moment}, before the current time {self.now}")
        heappush(self._heap, (moment, next(self._numbers), event))

    def next(self) -> list[Event]:
        """Advance the clock to the next event, and return all events of that time."""
        self.now = self._heap[0][0]
        events = []
        while self._heap and self._heap[0][0] == self.now:
            events.append(heappop(self._heap)[2])
        return events
