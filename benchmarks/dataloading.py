"""Data loading with worker processes: `fit` against a plain loop with torch's DataLoader and as many workers.

Both sides alternate on the same batches, each in its own process with new workers. Figures are samples per second, CPU
time per step including workers, and the share of reading that is hidden behind computing.
"""

from __future__ import annotations

import resource
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from falaj.training.runtime import loop
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.fit import fit
from harness import Result, Rule, report, say

ROUNDS = 7
STEPS = 60
SAMPLES, BATCH_SIZE = 2_000, 16
SIDE = 96
AT_WORST = 0.97


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are unpacked and augmented when read: about a millisecond of one core."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        one = torch.randint(0, 255, (3 * SIDE * SIDE,), generator=rng, dtype=torch.uint8)
        self._packed = zlib.compress(bytes(one.tolist()), 1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raw = torch.frombuffer(bytearray(zlib.decompress(self._packed)), dtype=torch.uint8)
        picture = raw.view(3, SIDE, SIDE).float() / 255 + 0.05 * torch.randn(3, SIDE, SIDE)
        return picture.flip(2), torch.tensor(index % 10)


class Turn(NamedTuple):
    per_second: float
    cpu_ms: float


def main() -> None:
    own_process = partial(ProcessPoolExecutor, 1, get_context("spawn"), torch.set_num_threads, (1,))
    with own_process() as ours, own_process() as theirs:
        results = [result for workers in (0, 1, 2) for result in compare(workers, ours, theirs)]
        results.append(ours.submit(hidden).result())
    report("dataloading", results)


def compare(workers: int, ours: ProcessPoolExecutor, theirs: ProcessPoolExecutor) -> list[Result]:
    """Return the rates and costs of `fit` and of the plain loop."""

    def turn(steps: int, *, plain_first: bool) -> tuple[Turn, Turn]:
        if plain_first:
            plain = theirs.submit(plain_loop, workers, steps).result()
            return ours.submit(through_fit, workers, steps).result(), plain
        fitted = ours.submit(through_fit, workers, steps).result()
        return fitted, theirs.submit(plain_loop, workers, steps).result()

    turn(5, plain_first=True)
    turns = [turn(STEPS, plain_first=number % 2 == 1) for number in range(ROUNDS)]
    ratios = sorted(ours.per_second / plain.per_second for ours, plain in turns)
    low, high = ratios[ROUNDS // 4], ratios[-ROUNDS // 4]
    say(f"{workers} workers: fit / plain loop: median {median(ratios):.2f}, half in {low:.2f} to {high:.2f}")
    speed = median(plain.per_second for _, plain in turns)
    costs = [median(turn[side].cpu_ms for turn in turns) for side in (0, 1)]
    peer = f"with {workers} workers (peer: a plain loop over torch's DataLoader)"
    return [
        Result(f"pictures/s {peer}", speed * median(ratios), speed, goal=AT_WORST, rule=Rule.RATIO_AT_LEAST),
        Result(f"CPU ms of a step {peer}", *costs, goal=1 / AT_WORST, rule=Rule.RATIO_AT_MOST),
    ]


def hidden() -> Result:
    """Return the share of reading that steps did not wait for, with one worker."""
    seen: list[tuple[float, float]] = []
    account = loop.make_result

    def note(training: loop.TrainingRun, stopped: loop.StopReason) -> loop.FitResult:
        seen.append((training.engine.waited_s, training.engine.hidden_s))
        return account(training, stopped)

    loop.make_result = note
    try:
        through_fit(1, STEPS)
    finally:
        loop.make_result = account
    waited, gained = seen[0]
    say(f"one worker: waited {waited:.2f} s for samples, {gained:.2f} s of reading were hidden")
    what = "part of the reading that is hidden by one worker (peer: all of it)"
    return Result(what, gained / (waited + gained), 1.0, goal=0.3, rule=Rule.FALAJ_AT_LEAST)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)),
    )


def plain_loop(workers: int, steps: int) -> Turn:
    model, plan = make_model(), BatchPlan(SAMPLES, BATCH_SIZE, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [plan.indices(step).tolist() for step in range(1, steps + 1)]
    fork = "fork" if workers else None  # as outside a pool; otherwise the start of interpreters would count
    clock = started()
    loader = DataLoader(Pictures(), batch_sampler=batches, num_workers=workers, multiprocessing_context=fork)
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return ended(clock, steps)


def through_fit(workers: int, steps: int) -> Turn:
    model, data = make_model(), Pictures()
    options = {"steps": steps, "batch_size": BATCH_SIZE, "workers": workers, "tune": "off", "device": "cpu"}
    clock = started()
    fit(model, nn.functional.cross_entropy, data, **options)
    return ended(clock, steps)


def started() -> tuple[float, float]:
    return time.perf_counter(), cpu_seconds()


def ended(clock: tuple[float, float], steps: int) -> Turn:
    seconds, cpu = time.perf_counter() - clock[0], cpu_seconds() - clock[1]
    return Turn(steps * BATCH_SIZE / seconds, 1e3 * cpu / steps)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, and of its children that have ended."""
    uses = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


if __name__ == "__main__":
    main()
