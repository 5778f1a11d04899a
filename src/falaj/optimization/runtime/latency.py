"""Measure latency of models in interleaved rounds, so that disturbances affect all of them alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from falaj.optimization.runtime.candidates import Predict
from falaj.optimization.runtime.conversion.converted import Array
from falaj.records.optimization import Interval

SINGLE, SERVED, BEST = "a single row", "32 rows", "its best batch"
SERVED_ROWS = 32
"""Rows that the model server batches without further settings."""
LARGEST_BATCH = 1024
LARGEST_GPU_BATCH = 16_384
SEARCH_S = 0.05
"""Seconds for which one batch size is tried in the search for the best one."""
SEARCHES = 2
"""Searches for the best batch of each model, one model after another, so that some time lies between them."""
GAIN = 1.05
"""A larger batch is better if it gives so many times the rows per second."""
BLOCK_S = 0.004
"""Seconds for which one model is measured at one batch size per round."""
ROUNDS = 40
MIN_ROUNDS = 7
LIMIT_S = 4.0
"""Seconds for each model."""
RESAMPLES = 2000
TAILS = (0.005, 0.995)
"""Ends of the 99% interval."""
WARM_UPS = 3


@dataclass
class LatencySamples:
    """Seconds by batch size: of each call, the median of each round, and CPU seconds per call of each round."""

    best: int = SERVED_ROWS
    calls: dict[int, list[float]] = field(default_factory=dict)
    medians: dict[int, list[float]] = field(default_factory=dict)
    processor: dict[int, list[float]] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """The batch sizes that are measured, by name."""
        return {SINGLE: 1, SERVED: SERVED_ROWS, BEST: self.best}

    def percentile(self, size: int, share: float) -> float:
        return float(np.quantile(self.calls[size], share))

    def median(self, size: int) -> float:
        return float(np.median(self.medians[size]))

    def processor_median(self, size: int) -> float:
        return float(np.median(self.processor[size]))


class BestBatch(NamedTuple):
    """The batch size that a search found to be best, and its rows per second."""

    size: int
    rows_per_s: float


def find_best_batch(predict: Predict, features: Array, *, largest: int = LARGEST_BATCH) -> BestBatch:
    """Return the batch size with the most rows per second, found by doubling from 1; two without a gain end it."""
    best, size, misses = BestBatch(1, 0.0), 1, 0
    while size <= largest and misses < 2:
        found = size / _quickest(predict, _batches(features, size)[0])
        if found > best.rows_per_s * GAIN:
            best, misses = BestBatch(size, found), 0
        else:
            misses += 1
        size *= 2
    return best


def find_best_batches(
    models: Mapping[str, Predict],
    features: Array,
    *,
    largest: Mapping[str, int] | None = None,
    on_model: Callable[[str], None] = lambda _: None,
) -> dict[str, int]:
    """Return the best batch size of each model: a disturbance that ends one search too early is met by the next."""
    found: dict[str, BestBatch] = {}
    for number in range(SEARCHES):
        for name, predict in models.items():
            if number == 0:
                on_model(name)
            limit = (largest or {}).get(name, LARGEST_BATCH)
            best = find_best_batch(predict, features, largest=limit)
            found[name] = max(found.get(name, best), best, key=lambda each: each.rows_per_s)
    return {name: best.size for name, best in found.items()}


def measure_interleaved(
    models: Mapping[str, Predict],
    features: Array,
    *,
    best: Mapping[str, int] | None = None,
    rounds: int = ROUNDS,
    limit_s: float = LIMIT_S,
    on_round: Callable[[int], None] = lambda _: None,
) -> dict[str, LatencySamples]:
    """Measure each model at each of its batch sizes, rotating the order, until `limit_s` for each model has passed.

    Its best batch is then the size with the most rows per second of those that were measured.
    """
    sizes = best or find_best_batches(models, features)
    found = {name: LatencySamples(best=sizes[name]) for name in models}
    batches = {
        size: _batches(features, size)
        for size in sorted({size for each in found.values() for size in each.sizes.values()})
    }
    for name, predict in models.items():
        for size in set(found[name].sizes.values()):
            for _ in range(WARM_UPS):
                predict(batches[size][0])
    names, began = [*models], time.perf_counter()
    collects = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            if number >= MIN_ROUNDS and time.perf_counter() - began > limit_s * len(names):
                break
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                for size in sorted(set(found[name].sizes.values())):
                    _time_block(models[name], batches[size], size, found[name])
            on_round(number + 1)
    finally:
        if collects:
            gc.enable()
    for each in found.values():
        each.best = max(each.medians, key=lambda size: size / each.median(size))
    return found


def speedups(original: LatencySamples, variant: LatencySamples, *, seed: int) -> dict[str, Interval]:
    """Return the speedup of the variant by batch size: the median over rounds with its bootstrap interval.

    At the best batch it is the ratio of rows per second, each model at its own best size.
    """
    random = np.random.default_rng(seed)
    found = {}
    for name, size in original.sizes.items():
        theirs = variant.sizes[name]
        times = (np.asarray(original.medians[size]) / size) / (np.asarray(variant.medians[theirs]) / theirs)
        drawn = np.median(times[random.integers(0, len(times), (RESAMPLES, len(times)))], axis=1)
        low, high = np.quantile(drawn, TAILS)
        found[name] = Interval(low=float(low), middle=float(np.median(times)), high=float(high))
    return found


def _quickest(predict: Predict, batch: Array) -> float:
    """Return the shortest time of a call; disturbances only lengthen it."""
    predict(batch)
    shortest, until = float("inf"), time.perf_counter() + SEARCH_S
    calls = 0
    while calls < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        predict(batch)
        shortest = min(shortest, time.perf_counter() - began)
        calls += 1
    return shortest


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
