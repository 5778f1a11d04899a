"""Counts and durations of a model's runs, by the number of their rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_SIZES = 1024
"""Numbers of rows that are counted apart; the runs with others are counted as one of 0 rows."""


@dataclass(slots=True)
class RunTotals:
    """Runs and their nanoseconds."""

    runs: int = 0
    ns: int = 0


@dataclass(slots=True)
class RunStatistics:
    """The successful runs of one model version since it was loaded."""

    rows: int = 0
    last_ms: int = 0
    """Milliseconds since the epoch; 0: it has not run yet."""
    total: RunTotals = field(default_factory=RunTotals)
    _sizes: dict[int, RunTotals] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, rows: int, ns: int) -> None:
        """Count one run; called from the threads of the model."""
        with self._lock:
            self.rows += rows
            self.last_ms = time.time_ns() // 1_000_000
            size = self._sizes.get(rows)
            if size is None:
                size = self._sizes.setdefault(rows if len(self._sizes) < MAX_SIZES else 0, RunTotals())
            for totals in (self.total, size):
                totals.runs += 1
                totals.ns += ns

    def by_rows(self) -> Mapping[int, RunTotals]:
        """Return the totals by the number of rows of a run, smallest first."""
        with self._lock:
            return {rows: RunTotals(totals.runs, totals.ns) for rows, totals in sorted(self._sizes.items())}
