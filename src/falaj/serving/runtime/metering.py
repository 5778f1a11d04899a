"""An engine that counts its runs and their duration: once per batch, whoever runs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from falaj.records.serving.tensors import ServedModel
from falaj.serving.runtime.engine import LONGEST_S, ModelEngine
from falaj.serving.runtime.probe import RunCost
from falaj.serving.runtime.run_statistics import RunStatistics

Array = npt.NDArray[Any]


_OF_THREAD = threading.local()


def last_run_ns() -> tuple[int, int]:
    """Return when the last run of this thread began and ended, by `time.perf_counter_ns`."""
    found: tuple[int, int] = getattr(_OF_THREAD, "span_ns", (0, 0))
    return found


class MeteredEngine:
    """Runs another engine, and counts. `run` may be called from several threads at once."""

    __slots__ = (
        *("_lock", "_run", "close", "cost", "failures"),
        *("in_process", "last_run_s", "model", "run_ns", "runs", "statistics"),
    )

    def __init__(self, engine: ModelEngine) -> None:
        self.model: ServedModel = engine.model
        self.cost: RunCost = engine.cost
        self.in_process: bool = engine.in_process
        self.close = engine.close
        self._run = engine.run
        self._lock = threading.Lock()
        self.statistics = RunStatistics()
        """The runs that did not fail, by the number of their rows."""
        self.runs = 0
        self.failures = 0
        """Runs that raised."""
        self.run_ns = 0
        self.last_run_s = 0.0
        """How long the run took that ended last, in whichever thread."""

    def run(self, inputs: Sequence[Array], *, limit_s: float = LONGEST_S) -> list[Array]:
        began, failed = time.perf_counter_ns(), 1
        try:
            outputs = self._run(inputs, limit_s=limit_s)
            failed = 0
            return outputs
        finally:
            ended = time.perf_counter_ns()
            _OF_THREAD.span_ns = began, ended
            with self._lock:
                self.runs += 1
                self.failures += failed
                self.run_ns += ended - began
                self.last_run_s = (ended - began) / 1e9
            if not failed:
                first = inputs[0] if inputs else None
                rows = len(first) if first is not None and first.ndim else 1
                self.statistics.add(rows, ended - began)


def statistics_of(engine: ModelEngine) -> RunStatistics:
    """Return the statistics of an engine; of one that is not metered, none."""
    return engine.statistics if isinstance(engine, MeteredEngine) else RunStatistics()
