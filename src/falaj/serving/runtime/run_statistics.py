"""Counts and durations of a model's runs, by the number of their rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from falaj.records.serving import ServedModel
from falaj.serving.runtime.engine import LONGEST_S, ModelEngine
from falaj.serving.runtime.probe import RunCost

Array = npt.NDArray[Any]

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


@dataclass(frozen=True, slots=True)
class CountedEngine:
    """An engine whose runs are counted."""

    engine: ModelEngine
    statistics: RunStatistics = field(default_factory=RunStatistics)

    @property
    def model(self) -> ServedModel:
        return self.engine.model

    @property
    def cost(self) -> RunCost:
        return self.engine.cost

    @property
    def in_process(self) -> bool:
        return self.engine.in_process

    def run(self, inputs: Sequence[Array], *, limit_s: float = LONGEST_S) -> list[Array]:
        began = time.perf_counter_ns()
        outputs = self.engine.run(inputs, limit_s=limit_s)
        first = inputs[0] if inputs else None
        rows = len(first) if first is not None and first.ndim else 1
        self.statistics.add(rows, time.perf_counter_ns() - began)
        return outputs

    def close(self) -> None:
        self.engine.close()


def statistics_of(engine: ModelEngine) -> RunStatistics:
    """Return the statistics of an engine; of one that is not counted, none."""
    return engine.statistics if isinstance(engine, CountedEngine) else RunStatistics()
