"""How long requests may wait for a model: long enough for bursts, briefly while it is overloaded.

A queue that empties again absorbs bursts; one that grows and grows only adds latency. While the queue is stable, work
of about a second may wait. Once it has grown for several intervals in a row, or is full, the model is overloaded: then
no more than a few runs may wait, so that accepted requests keep their latency and others are refused at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

BURST_S = 1.0
"""How long a request may wait while the model is not overloaded."""
WAITING_RUNS = 8
"""How long it may wait while it is, in runs of the model."""
MIN_WAIT_S = 0.005
LONG_S = 0.1
"""A queue that is shorter is no sign of overload, however it grows: the machine may have paused."""
ADMITTED = 0.75
"""The expected wait of an accepted request, as a part of the longest: what runs later than expected is not lost."""
INTERVAL_S = 0.04
INTERVAL_RUNS = 2
"""How often growth is judged: in seconds, and in runs of a slow model."""
STEADY = 0.05
GROWTH = {3: 0.2, 24: 0.05}
"""Growth that means overload, by the number of intervals that it lasts, as a part of what was done in them.

Each third of them must have grown by `STEADY`, so that a burst is none, and neither are clients that wait for their
answers: with them the queue is long, but does not grow.
"""
CALM_S = 0.5
"""How long nothing must have been refused before the model counts as no longer overloaded."""
SMOOTHING = 0.1
MAX_SLOWDOWN = 1000.0
MAX_OUTLIER = 4.0
"""One run counts for no more than so many times what runs usually take, such as one that waited for a new process."""
MAX_RETRY_S = 60


class QueueLimit:
    """Decides how much work may wait for a model, from the speed at which it is done. All times are given to it.

    `run_s` is what a run took when the model was loaded, `instances` how many go on at a time, and `max_queue_s` the
    operator's limit, which holds always.
    """

    __slots__ = (
        *("_calm_since", "_done_s", "_fixed_s", "_instances", "_interval_s", "_intervals", "_judged_at"),
        *("_refused_s", "_run_s", "_slowdown", "_waiting_s", "is_overloaded", "max_wait_s", "work_s"),
    )

    def __init__(
        self, *, run_s: float, instances: int, max_queue_s: float | None = None, now: float = 0.0
    ) -> None:
        self._run_s = max(run_s, 1e-6)
        self._instances = instances
        self._fixed_s = max_queue_s
        self._interval_s = max(INTERVAL_S, INTERVAL_RUNS * self._run_s)
        self._slowdown = 1.0
        self._intervals: deque[tuple[float, float]] = deque(maxlen=max(GROWTH))
        """Growth, and what was done, in each of the last intervals."""
        self._judged_at = now
        self._waiting_s = self._done_s = self._refused_s = 0.0
        self._calm_since = now
        self.is_overloaded = False
        self.max_wait_s = 0.0
        """How long a request may wait; after that it is refused."""
        self.work_s = 0.0
        """Seconds of work that may wait before another request is refused."""
        self._update()

    @property
    def interval_s(self) -> float:
        return self._interval_s

    def expected_s(self, work_s: float) -> float:
        """Return how long it takes until waiting work has been done, at the speed of the last runs."""
        return work_s * self._slowdown / self._instances

    def retry_after_s(self, work_s: float) -> int:
        """Return in how many whole seconds a refused request may be sent again."""
        return min(MAX_RETRY_S, max(1, math.ceil(self.expected_s(work_s))))

    def refused(self, work_s: float, now: float) -> None:
        """Count a request that was refused because too much work waits."""
        self._refused_s += work_s
        self._calm_since = now
        if not self.is_overloaded:
            self._set_overloaded()

    def ran(self, work_s: float, *, expected_s: float, took_s: float) -> None:
        """Count a run: the work of its requests, and what it took where `expected_s` was measured at load."""
        self._done_s += work_s
        measured = min(took_s / max(expected_s, 1e-6), MAX_OUTLIER * self._slowdown, MAX_SLOWDOWN)
        self._slowdown += SMOOTHING * (measured - self._slowdown)
        self._update()

    def judge(self, waiting_s: float, now: float) -> None:
        """Compare waiting work with that of an interval ago, once the interval is over."""
        if now - self._judged_at < self._interval_s:
            return
        growth = waiting_s - self._waiting_s + self._refused_s
        is_long = self.expected_s(waiting_s) > max(self._brief_s, LONG_S)
        self._intervals.append((growth, self._done_s))
        self._judged_at, self._waiting_s = now, waiting_s
        self._done_s = self._refused_s = 0.0
        if not self.is_overloaded and is_long and self._grows():
            self._calm_since = now
            self._set_overloaded()
        elif self.is_overloaded and now - self._calm_since > CALM_S:
            self.is_overloaded = False
            self._update()

    @property
    def _brief_s(self) -> float:
        return max(MIN_WAIT_S, WAITING_RUNS * self._run_s * self._slowdown)

    def _grows(self) -> bool:
        """Return whether the queue has grown for a while, briefly by much or longer by less."""
        kept = list(self._intervals)
        return any(len(kept) >= number and _has_grown(kept[-number:], by) for number, by in GROWTH.items())

    def _set_overloaded(self) -> None:
        self.is_overloaded = True
        self._update()

    def _update(self) -> None:
        if self._fixed_s is not None:
            self.max_wait_s = self._fixed_s
        elif self.is_overloaded:
            self.max_wait_s = self._brief_s
        else:
            self.max_wait_s = max(BURST_S, self._brief_s)
        self.work_s = ADMITTED * self.max_wait_s * self._instances / self._slowdown


def _has_grown(intervals: Sequence[tuple[float, float]], by: float) -> bool:
    third = len(intervals) // 3
    parts = [intervals[start : start + third] for start in range(0, 3 * third, third)]
    sums = [(sum(growth for growth, _ in part), sum(done for _, done in part)) for part in parts]
    is_steady = all(growth > STEADY * done for growth, done in sums)
    return is_steady and sum(growth for growth, _ in sums) > by * sum(done for _, done in sums)
