"""Measure latency of models in interleaved rounds, so that disturbances affect all of them alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from falaj.optimization.runtime.candidates import Predict
from falaj.optimization.runtime.conversion.converted import Array
from falaj.records.optimization import Interval

SIZES = {"a single row": 1, "32 rows": 32, "256 rows": 256}
SERVED = ("a single row", "32 rows")
"""Batch sizes that acceptance is based on: the model server batches at most 32 rows. Others are only reported."""
BLOCK_S = 0.004
"""Seconds for which one model is measured at one batch size per round."""
ROUNDS = 40
MIN_ROUNDS = 5
LIMIT_S = 10.0
RESAMPLES = 1000
WARM_UPS = 3


@dataclass
class LatencySamples:
    """Seconds by batch size: of each call, the median of each round, and CPU seconds per call of each round."""

    calls: dict[int, list[float]] = field(default_factory=dict)
    medians: dict[int, list[float]] = field(default_factory=dict)
    processor: dict[int, list[float]] = field(default_factory=dict)

    def percentile(self, size: int, share: float) -> float:
        return float(np.quantile(self.calls[size], share))

    def median(self, size: int) -> float:
        return float(np.median(self.medians[size]))

    def processor_median(self, size: int) -> float:
        return float(np.median(self.processor[size]))


def measure_interleaved(
    models: Mapping[str, Predict],
    features: Array,
    *,
    rounds: int = ROUNDS,
    limit_s: float = LIMIT_S,
    on_round: Callable[[int], None] = lambda _: None,
) -> dict[str, LatencySamples]:
    """Measure every model at every batch size, in as many rounds as fit into `limit_s`, rotating the order."""
    batches = {size: _batches(features, size) for size in SIZES.values()}
    for predict in models.values():
        for size in batches:
            for _ in range(WARM_UPS):
                predict(batches[size][0])
    found = {name: LatencySamples() for name in models}
    names, began = [*models], time.perf_counter()
    collects = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            if number >= MIN_ROUNDS and time.perf_counter() - began > limit_s:
                break
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                for size, parts in batches.items():
                    _time_block(models[name], parts, size, found[name])
            on_round(number + 1)
    finally:
        if collects:
            gc.enable()
    return found


def speedups(original: LatencySamples, variant: LatencySamples, *, seed: int) -> dict[str, Interval]:
    """Return the speedup of the variant by batch size: the median over rounds with its bootstrap interval."""
    random = np.random.default_rng(seed)
    found = {}
    for name, size in SIZES.items():
        times = np.asarray(original.medians[size]) / np.asarray(variant.medians[size])
        drawn = np.median(times[random.integers(0, len(times), (RESAMPLES, len(times)))], axis=1)
        low, high = np.quantile(drawn, (0.025, 0.975))
        found[name] = Interval(low=float(low), middle=float(np.median(times)), high=float(high))
    return found


def _batches(features: Array, size: int) -> list[Array]:
    """Return batches of `size` rows, repeating the rows if there are too few."""
    count = max(1, min(32, len(features) // size))
    rows = np.resize(np.arange(len(features)), count * size)
    return [np.ascontiguousarray(features[rows[i * size : (i + 1) * size]]) for i in range(count)]


def _time_block(predict: Predict, parts: Sequence[Array], size: int, timed: LatencySamples) -> None:
    seconds: list[float] = []
    used = time.process_time()
    until = time.perf_counter() + BLOCK_S
    ended, number = 0.0, 0
    while ended < until:
        part = parts[number % len(parts)]
        began = time.perf_counter()
        predict(part)
        ended = time.perf_counter()
        seconds.append(ended - began)
        number += 1
    used = time.process_time() - used
    timed.calls.setdefault(size, []).extend(seconds)
    timed.medians.setdefault(size, []).append(float(np.median(seconds)))
    timed.processor.setdefault(size, []).append(used / number)
