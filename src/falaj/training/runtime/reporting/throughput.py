"""Throughput of a run: samples per second, step time, MFU and goodput. None of it costs time per step.

MFU (model FLOPs utilization) is the share of the hardware's peak FLOP/s that the model's operations use; a run of less
than a minute has none, unless its cost is cached. Goodput is the time in useful training steps divided by the total
time since the run began: evaluations, checkpoints, restarts and recomputed steps are not useful. Time between an
orderly end and the next call does not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from falaj.training.runtime.agent.agents import MetricValue
from falaj.training.runtime.checkpointing.position import Position
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.sources import Batch, SampleSource
from falaj.training.runtime.planning.plan import Precision
from falaj.training.runtime.profiling.cost import CostCounter, StepCost, cost_key, load_cost, store_cost
from falaj.training.runtime.profiling.peaks import DevicePeaks, device_peaks
from falaj.training.runtime.step.calling import Loss

MIN_INTERVAL_S = 0.5
"""Rates over less time are not reported."""
MIN_RUN_S_TO_COUNT = 60.0
"""Counting the operations of a model takes about a second, so shorter runs skip it."""
MIN_STEPS = 20


class StepClock:
    """Measures total time and time in training steps."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.began_at = time.time()
        self._excluded_s = 0.0
        self._excluded_since: float | None = None

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude this time from training steps."""
        if self._excluded_since is not None:  # nested
            yield
            return
        self._excluded_since = time.perf_counter()
        try:
            yield
        finally:
            self._excluded_s += time.perf_counter() - self._excluded_since
            self._excluded_since = None

    def read(self) -> tuple[float, float]:
        """Return total seconds, and seconds in training steps."""
        now = time.perf_counter()
        aside = self._excluded_s + (0.0 if self._excluded_since is None else now - self._excluded_since)
        return now - self._start, now - self._start - aside


class ModelCost:
    """The floating-point operations per sample, and the peak performance of the devices."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        sample: Batch,
        *,
        samples: int,
        device: torch.device,
        devices: int,
        precision: Precision,
    ) -> None:
        """`samples` is the size of a micro-batch."""
        self._model, self._loss, self._sample = model, loss, sample
        self._samples, self._device, self._devices, self._precision = samples, device, devices, precision
        self._key: str | None = None
        self._ghost: CostCounter | None = None
        self._is_counted = self._is_recalled = False
        self.cost: StepCost | None = None
        self._peaks: DevicePeaks | None = None

    def make_ghost(self) -> None:
        """Copy the model's structure before it is distributed over processes."""
        with suppress(Exception):
            self._key = cost_key(self._model, self._sample, self._samples)
            self._ghost = CostCounter(self._model, self._loss)

    def count(self) -> StepCost | None:
        """Return the cost of a micro-batch, counted once; None where it cannot be counted."""
        if not self._is_counted and self.cost is None:
            self._is_counted = True
            with suppress(Exception):  # models whose cost does not follow from shapes
                key = self._key or cost_key(self._model, self._sample, self._samples)
                ghost = self._ghost or CostCounter(self._model, self._loss)
                self.cost = ghost.count(self._sample, samples=self._samples)
                store_cost(key, self.cost)
        return self.cost

    def recall(self) -> None:
        """Load the cost from the cache."""
        if not (self._is_counted or self._is_recalled):
            self._is_recalled = True
            self.cost = load_cost(self._model, self._sample, samples=self._samples)

    def of_step(self, samples: int) -> StepCost | None:
        """Return the cost of a step over `samples` samples."""
        counted = self.count()
        if counted is None:
            return None
        return StepCost(counted.flops / self._samples * samples, counted.bytes / self._samples * samples)

    def peaks(self, *, reached: float = 0.0, with_bandwidth: bool = False) -> DevicePeaks | None:
        """Return the peak performance of one device; None where memory does not suffice to measure it."""
        known = self._peaks
        if known is None or (known.measured and reached > known.flops) or with_bandwidth:
            with suppress(RuntimeError, MemoryError):
                self._peaks = device_peaks(
                    self._device, self._precision, reached=reached, with_bandwidth=with_bandwidth
                )
        return self._peaks

    def mfu(self, samples_per_second: float) -> float | None:
        if self.cost is None or not self.cost.flops:
            return None
        reached = self.cost.flops / self._samples * samples_per_second / self._devices
        peaks = self.peaks(reached=reached)
        return None if peaks is None else reached / peaks.flops


@dataclass(frozen=True)
class Throughput:
    """Throughput over some steps."""

    samples_per_second: float
    step_time: float
    mfu: float | None
    goodput: float

    def metrics(self, step: int) -> list[MetricValue]:
        named = {
            "samples_per_second": self.samples_per_second,
            "step_time": self.step_time,
            "goodput": self.goodput,
            "mfu": self.mfu,
        }
        return [MetricValue(step, name, value) for name, value in named.items() if value is not None]


class ThroughputMeter:
    """Measures the throughput of a run that resumed at the position `before`."""

    def __init__(
        self, clock: StepClock, plan: BatchPlan, before: Position, *, total: int, model_cost: ModelCost | None
    ) -> None:
        self._clock, self._plan, self._model_cost = clock, plan, model_cost
        self._first, self._total = before.step, total
        self._useful_before, self._spent_before = (
            before.useful_s,
            before.spent_s + interrupted_s(before, clock),
        )
        self._last_step, self._last_useful = before.step, clock.read()[1]

    def since_last(self, step: int) -> list[MetricValue]:
        """Return the metrics of the steps since the last call, up to `step`; none after too short a time."""
        useful = self._clock.read()[1]
        took = useful - self._last_useful
        if step <= self._last_step or took < MIN_INTERVAL_S:
            return []
        if self._model_cost is not None:
            self._count_cost(self._model_cost, step, useful)
        found = self._rates(self._last_step, step, took)
        self._last_step, self._last_useful = step, self._clock.read()[1]
        return found.metrics(step)

    def overall(self, step: int) -> Throughput:
        """Return the throughput of all steps of this call, and the goodput of the whole run."""
        useful = self._clock.read()[1]
        if self._model_cost is not None and useful >= MIN_INTERVAL_S:
            self._model_cost.recall()
        return self._rates(self._first, step, useful)

    def remember(self, position: Position, *, ends: bool) -> Position:
        """Return `position` with the times for the goodput of the whole run."""
        seconds, useful = self._clock.read()
        return replace(
            position,
            useful_s=self._useful_before + useful,
            spent_s=self._spent_before + seconds,
            left_at=None if ends else time.time(),
        )

    def _rates(self, first: int, step: int, took: float) -> Throughput:
        rate = (self._plan.samples_until(step) - self._plan.samples_until(first)) / took
        seconds, useful = self._clock.read()
        goodput = (self._useful_before + useful) / (self._spent_before + seconds)
        mfu = self._model_cost.mfu(rate) if self._model_cost is not None else None
        return Throughput(rate, took / max(1, step - first), mfu, goodput)

    def _count_cost(self, model_cost: ModelCost, step: int, useful: float) -> None:
        """Count the cost of a step if the run is long enough."""
        model_cost.recall()
        expected = useful / max(1, step - self._first) * (self._total - self._first)
        if model_cost.cost is None and expected >= MIN_RUN_S_TO_COUNT:
            with self._clock.excluded():
                model_cost.count()


def interrupted_s(before: Position, clock: StepClock) -> float:
    """Return the seconds between the last checkpoint of an interrupted run and its resume."""
    return 0.0 if before.left_at is None else max(0.0, clock.began_at - before.left_at)


def make_model_cost(
    model: nn.Module,
    loss: Loss,
    source: SampleSource,
    *,
    samples: int,
    steps: int,
    device: torch.device,
    devices: int,
    precision: Precision,
    wanted: bool = False,
) -> ModelCost | None:
    """Return the cost of a run's steps, based on a sample that is read before the loader starts.

    `samples` is the size of a micro-batch. A short run has no cost, unless it is `wanted`. A model that will be
    distributed cannot be copied afterwards, so it is copied here.
    """
    if steps < MIN_STEPS and not wanted:
        return None
    try:
        sample = source.read(torch.zeros(1, dtype=torch.int64), seed=0)
    except Exception:  # the first step will raise it
        return None
    model_cost = ModelCost(
        model, loss, sample, samples=samples, device=device, devices=devices, precision=precision
    )
    if devices > 1:
        model_cost.recall()
        if model_cost.cost is None:
            model_cost.make_ghost()
    return model_cost
