"""Search for the number of worker processes and the prefetch depth, measured on the dataset itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.dataloading.selection import make_loader
from falaj.training.runtime.data.dataloading.start_method import choose_start_method, cores_per_rank
from falaj.training.runtime.data.sources import DatasetSource
from falaj.training.runtime.options import FitOptions
from falaj.training.runtime.planning.numerics import apply_numerics
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.planning.search import MIN_TRIAL_S, OUT_OF_TIME, SearchResult, record_outcome
from falaj.training.runtime.planning.trials import TrialOutcome, TrialRunner, reason_of
from falaj.training.runtime.step.micro_batches import MicroBatchReader

CHEAP_SHARE = 0.05
"""Reading that takes less than this share of a step does not need a worker process."""
MARGIN = 1.05
DEEP_PREFETCH = 4
WARM_STEPS = 2
TIMED_S, AT_MOST_S = 0.5, 4.0


def search_dataloading(
    items: DatasetSource,
    plan: Plan,
    try_out: Callable[[Plan], TrialOutcome],
    *,
    share: float,
    allowed_s: float,
) -> SearchResult:
    """Return the best options found within `allowed_s`; `share` is the time of reading relative to computing."""
    found, began = SearchResult(), time.monotonic()
    plain = replace(plan, workers=0)
    if share < CHEAP_SHARE:
        found.best = TrialOutcome(plan=plain)
        return found
    for candidate in dataloading_candidates(found, plain, cores=cores_per_rank()):
        if candidate.workers and (way := choose_start_method(items)).method is None:
            outcome = TrialOutcome(plan=candidate, rejection=way.why)
        elif found.tried and allowed_s - (time.monotonic() - began) < MIN_TRIAL_S:
            outcome = TrialOutcome(plan=candidate, rejection=OUT_OF_TIME)
        else:
            outcome = try_out(candidate)
        record_outcome(found, outcome, margin=MARGIN)
    found.seconds = time.monotonic() - began
    return found


def dataloading_candidates(found: SearchResult, plain: Plan, *, cores: int) -> Iterator[Plan]:
    """Yield 0, 1, 2, 4 … workers while that is faster; then the best number with a deeper prefetch."""
    yield plain
    workers = 1
    while workers <= cores:
        yield replace(plain, workers=workers)
        if found.best is None or found.best.plan.workers != workers:
            break
        workers *= 2
    if found.best is not None and found.best.plan.workers and plain.prefetch is None:
        yield replace(found.best.plan, prefetch=DEEP_PREFETCH)


class DataloadingTrials:
    """Reads the dataset for a moment as a plan states."""

    def __init__(
        self, runner: TrialRunner, items: DatasetSource, options: FitOptions, *, computing: float
    ) -> None:
        """`computing` is the number of samples that can be computed per second."""
        self._runner, self._items, self._seed = runner, items, options.batching.seed
        self._computing = computing

    def __call__(self, plan: Plan) -> TrialOutcome:
        """Measure the samples per second; on a CPU together with the computing, which uses the same cores."""
        began = time.perf_counter()
        try:
            rate, fault = self._on_gpu(plan) if self._runner.on_gpu else self._on_cpu(plan), None
        except Exception as failure:
            rate, fault = 0.0, reason_of(failure)
        seconds = time.perf_counter() - began
        return TrialOutcome(plan=plan, samples_per_second=rate, seconds=seconds, rejection=fault)

    def _on_cpu(self, plan: Plan) -> float:
        eager = replace(plan, compile="off")  # compiling again would take longer than all of this
        with apply_numerics(plan):
            engine, batches, _ = self._runner.engine(eager, source=self._items)
            with closing(engine):
                return measure_rate(batches, lambda step, indices: engine.run_step(step, indices, _ignore))

    def _on_gpu(self, plan: Plan) -> float:
        """Measure reading alone: this process must not initialize the GPU, which computes in parallel."""
        batches = self._runner.batches(plan)
        reader = MicroBatchReader(self._items, seed=self._seed, count=plan.micro_batches)
        here = torch.device("cpu")
        loader, _ = make_loader(reader, batches, plan, here, last=sys.maxsize, notify=_ignore)
        with closing(loader):
            return min(self._computing, measure_rate(batches, loader.take))


def measure_rate(batches: BatchPlan, take: Callable[[int, Tensor], object]) -> float:
    """Return the samples per second after the first steps, when workers have started and read ahead."""
    first = began = time.perf_counter()
    samples = 0
    for step in count(1):
        indices = batches.indices(step)
        take(step, indices)
        samples, now = samples + len(indices), time.perf_counter()
        is_late = now - first > AT_MOST_S
        if step == WARM_STEPS and not is_late:
            began, samples = now, 0
        elif is_late or (step > WARM_STEPS and now - began > TIMED_S):
            break
    return samples / (time.perf_counter() - began)


def _ignore(_: object) -> None:
    return
