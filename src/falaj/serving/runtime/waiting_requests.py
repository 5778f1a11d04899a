"""The order of waiting requests: by priority, then in turns between callers, by the work that they ask for."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeVar

DEFAULT_PRIORITY = 1
"""What priority 0 stands for. It is the highest, so that a request can give way to others but not overtake them."""


class PrioritizedRequest(Protocol):
    """A request that waits for its turn."""

    cancelled: bool
    caller: str
    priority: int
    """Lower numbers run first; 0 is the default."""
    deadline: float | None
    """Event loop time after which nobody waits for the response."""


R = TypeVar("R", bound=PrioritizedRequest)


class Waiting(NamedTuple, Generic[R]):
    """A waiting request: its rows, the seconds of work that it asks for, and since when it waits."""

    request: R
    rows: int
    work_s: float
    since: float


class _CallerQueue(Generic[R]):
    """The requests of one caller at one priority. `turn` is the work that it had done when it is next."""

    __slots__ = ("caller", "items", "turn", "work_s")

    def __init__(self, caller: str, turn: float) -> None:
        self.caller = caller
        self.items: deque[Waiting[R]] = deque()
        self.turn = turn
        self.work_s = 0.0


class _PriorityLevel(Generic[R]):
    """The callers of one priority: the one whose `turn` is the smallest is next (start-time fair queueing)."""

    __slots__ = ("by_turn", "callers", "turn", "work_s")

    def __init__(self) -> None:
        self.callers: dict[str, _CallerQueue[R]] = {}
        self.by_turn: list[tuple[float, int, _CallerQueue[R]]] = []
        self.turn = 0.0
        self.work_s = 0.0


class WaitingRequests(Generic[R]):
    """Requests that wait. A caller who sends many delays its own requests, not those of others."""

    __slots__ = ("_levels", "_numbers", "size", "work_s")

    def __init__(self) -> None:
        self._levels: dict[int, _PriorityLevel[R]] = {DEFAULT_PRIORITY: _PriorityLevel()}
        self._numbers = count()
        self.size = 0
        self.work_s = 0.0
        """Seconds of work of all requests."""

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Waiting[R]]:
        return (
            item
            for level in self._levels.values()
            for queue in level.callers.values()
            for item in queue.items
        )

    def add(self, item: Waiting[R]) -> None:
        request = item[0]
        priority = request.priority or DEFAULT_PRIORITY
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _PriorityLevel()
        queue = level.callers.get(request.caller)
        if queue is None:
            queue = level.callers[request.caller] = _CallerQueue(request.caller, level.turn)
            heapq.heappush(level.by_turn, (queue.turn, next(self._numbers), queue))
        queue.items.append(item)
        queue.work_s += item[2]
        level.work_s += item[2]
        self.work_s += item[2]
        self.size += 1

    def first(self) -> Waiting[R]:
        """Return the request that is next."""
        return self._first_level()[1].by_turn[0][2].items[0]

    def take(self) -> Waiting[R]:
        """Remove and return the request that is next."""
        priority, level = self._first_level()
        queue = level.by_turn[0][2]
        item = queue.items.popleft()
        work_s = item[2]
        level.turn = queue.turn
        queue.turn += work_s
        queue.work_s -= work_s
        level.work_s -= work_s
        self.work_s -= work_s
        self.size -= 1
        if not queue.items:
            del level.callers[queue.caller]
            heapq.heappop(level.by_turn)
            self._forget(priority, level)
        elif len(level.by_turn) > 1:
            heapq.heapreplace(level.by_turn, (queue.turn, next(self._numbers), queue))
        return item

    def work_before(self, request: R) -> float:
        """Return the seconds of work that run before `request` would, if callers go on taking turns."""
        priority = request.priority or DEFAULT_PRIORITY
        before = sum(level.work_s for number, level in self._levels.items() if number < priority)
        level = self._levels.get(priority)
        queue = None if level is None else level.callers.get(request.caller)
        if level is None or queue is None:
            return before
        return before + min(queue.work_s * len(level.callers), level.work_s)

    def remove_all(self) -> list[Waiting[R]]:
        """Remove and return all requests, in their order."""
        return [self.take() for _ in range(self.size)]

    def _first_level(self) -> tuple[int, _PriorityLevel[R]]:
        levels = self._levels
        if len(levels) == 1:
            return DEFAULT_PRIORITY, levels[DEFAULT_PRIORITY]
        priority = min(number for number, level in levels.items() if level.by_turn)
        return priority, levels[priority]

    def _forget(self, priority: int, level: _PriorityLevel[R]) -> None:
        """Drop what an empty level, or an empty queue, remembers."""
        if not level.callers:
            level.turn = level.work_s = 0.0
            if priority != DEFAULT_PRIORITY:
                del self._levels[priority]
        if not self.size:
            self.work_s = 0.0
