"""How many processes read a dataset, and how far ahead: tried on the dataset itself, beside the chosen computing."""

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
from falaj.training.runtime.plan.numerics import numerics_of
from falaj.training.runtime.plan.plans import Plan
from falaj.training.runtime.plan.searching import LEAST_LEFT_S, TOO_LATE, Found, note
from falaj.training.runtime.plan.trials import Outcome, TrialGround, reason_of
from falaj.training.runtime.settings import FitOptions
from falaj.training.runtime.step.micro_batches import MicroBatchReader

CHEAP = 0.05
"""Reading that takes less than this part of a step is not worth a process."""
MARGIN = 1.05
FARTHER = 4
WARM_STEPS = 2
TIMED_S, AT_MOST_S = 0.5, 4.0


def search_reading(
    items: DatasetSource,
    plan: Plan,
    try_out: Callable[[Plan], Outcome],
    *,
    share: float,
    allowed_s: float,
) -> Found:
    """The best way to read found within `allowed_s`; `share` is the reading of a step beside its computing."""
    found, began = Found(), time.monotonic()
    plain = replace(plan, workers=0)
    if share < CHEAP:
        found.best = Outcome(plan=plain)
        return found
    for candidate in candidates(found, plain, cores=cores_per_rank()):
        if candidate.workers and (way := choose_start_method(items)).method is None:
            outcome = Outcome(plan=candidate, why_not=way.why)
        elif found.tried and allowed_s - (time.monotonic() - began) < LEAST_LEFT_S:
            outcome = Outcome(plan=candidate, why_not=TOO_LATE)
        else:
            outcome = try_out(candidate)
        note(found, outcome, margin=MARGIN)
    found.seconds = time.monotonic() - began
    return found


def candidates(found: Found, plain: Plan, *, cores: int) -> Iterator[Plan]:
    """None, one, two, four … workers while that is faster; then the best number, reading farther ahead."""
    yield plain
    workers = 1
    while workers <= cores:
        yield replace(plain, workers=workers)
        if found.best is None or found.best.plan.workers != workers:
            break
        workers *= 2
    if found.best is not None and found.best.plan.workers and plain.prefetch is None:
        yield replace(found.best.plan, prefetch=FARTHER)


class ReadingTrials:
    """Reads the dataset as a plan says, for a moment."""

    def __init__(
        self, ground: TrialGround, items: DatasetSource, options: FitOptions, *, computing: float
    ) -> None:
        """`computing` is how many samples a second can be computed."""
        self._ground, self._items, self._seed = ground, items, options.batching.seed
        self._computing = computing

    def __call__(self, plan: Plan) -> Outcome:
        """The samples a second; on a CPU beside the computing, which wants the same cores."""
        began = time.perf_counter()
        try:
            rate, fault = self._on_gpu(plan) if self._ground.on_gpu else self._on_cpu(plan), None
        except Exception as failure:
            rate, fault = 0.0, reason_of(failure)
        seconds = time.perf_counter() - began
        return Outcome(plan=plan, samples_per_second=rate, seconds=seconds, why_not=fault)

    def _on_cpu(self, plan: Plan) -> float:
        eager = replace(plan, compile="off")  # compiling again would take longer than all of this
        with numerics_of(plan):
            engine, batches, _ = self._ground.engine(eager, source=self._items)
            with closing(engine):
                return rate_of(batches, lambda step, indices: engine.run_step(step, indices, _ignore))

    def _on_gpu(self, plan: Plan) -> float:
        """Reading alone: this process must not start the GPU, which computes meanwhile and needs no core for it."""
        batches = self._ground.batches(plan)
        reader = MicroBatchReader(self._items, seed=self._seed, count=plan.micro_batches)
        here = torch.device("cpu")
        loader, _ = make_loader(reader, batches, plan, here, last=sys.maxsize, notify=_ignore)
        with closing(loader):
            return min(self._computing, rate_of(batches, loader.take))


def rate_of(batches: BatchPlan, take: Callable[[int, Tensor], object]) -> float:
    """Samples a second, after the first steps: what reads must start, and be ahead."""
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
