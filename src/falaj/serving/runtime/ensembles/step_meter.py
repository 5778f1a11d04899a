"""Counts of an ensemble and of each of its steps: how long their runs took, and which failed."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass, field

from falaj.records.serving.statistics import BOUNDS_S


@dataclass(slots=True)
class RunMeter:
    """The runs of an ensemble, or of one step. Used from several threads."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """Runs by their duration, in the buckets of the server's metrics."""
    seconds: float = 0.0
    failures: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, seconds: float, *, failed: bool) -> None:
        with self._lock:
            self.buckets[bisect_left(BOUNDS_S, seconds)] += 1
            self.seconds += seconds
            self.failures += failed
