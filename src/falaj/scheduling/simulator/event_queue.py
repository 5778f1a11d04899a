"""The virtual clock: what happens next, and when."""

from __future__ import annotations

from datetime import datetime
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from falaj.scheduling.simulator.simulated_job import SimulatedJob


class JobArrival(NamedTuple):
    case: SimulatedJob


class JobEnd(NamedTuple):
    """The job has computed all, or its time is up. Told to a job that has been stopped since, it means nothing."""

    case: SimulatedJob
    turn: int


class GraceEnd(NamedTuple):
    """The grace of an evicted job is over."""

    case: SimulatedJob
    turn: int


class NodeLoss(NamedTuple):
    node: str


class NodeReturn(NamedTuple):
    node: str


class DecisionDue(NamedTuple):
    """The scheduler, which was asked too early, is asked again."""


Event = JobArrival | JobEnd | GraceEnd | NodeLoss | NodeReturn | DecisionDue


class EventQueue:
    """Events to come, in the order of time; those of one moment in the order in which they were put down."""

    def __init__(self, begin: datetime) -> None:
        self.now = begin
        self._heap: list[tuple[datetime, int, Event]] = []
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def at(self, moment: datetime, event: Event) -> None:
        if moment < self.now:
            raise ValueError(f"{event} is put down for {moment}, and it is {self.now} already")
        heappush(self._heap, (moment, next(self._numbers), event))

    def next(self) -> list[Event]:
        """All that happens at the next moment, to which the clock goes on."""
        self.now = self._heap[0][0]
        events = []
        while self._heap and self._heap[0][0] == self.now:
            events.append(heappop(self._heap)[2])
        return events
