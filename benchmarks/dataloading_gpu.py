"""Overlap of reading, copying and computing on a GPU, against a plain loop; run by hand, prints its results.

A batch takes about as long on the host as on the GPU: without overlap a step takes the sum of both, with overlap the
larger. Measured are a loop that waits for each step, and `fit` without and with pinned prefetching and workers.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from falaj.training.runtime.fit import fit
from falaj.training.runtime.planning.plan import Plan

SAMPLES, BATCH_SIZE, WIDTH = 512, 64, 64 * 1024
STEPS = 60
DEVICE = torch.device("cuda")


class Rows:
    """Samples of a quarter of a megabyte, which are copied and scaled when read."""

    def __init__(self) -> None:
        self._rows = torch.randn(SAMPLES, WIDTH)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self._rows[index] * 0.5
        return row, row[:1]


class Busy(nn.Module):
    """Computes for a given time."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.first, self.square = nn.Linear(WIDTH, 1024), nn.Linear(1024, 1024)
        self.last, self._rounds = nn.Linear(1024, 1), rounds

    def forward(self, rows: Tensor) -> Tensor:
        x = self.first(rows).repeat(64, 1)
        for _ in range(self._rounds):
            x = torch.tanh(self.square(x))
        found: Tensor = self.last(x[: len(rows)])
        return found


def main() -> None:
    data = Rows()
    reading = timed(lambda: batch_of(data, 0), 10)
    rounds = 1
    while computing(rounds) < reading and rounds < 4096:
        rounds *= 2
    print(f"reading a batch {1e3 * reading:.1f} ms, computing a step {1e3 * computing(rounds):.1f} ms")
    show("plain loop, one after the other", one_after_the_other(data, rounds))
    for words, plan in (
        ("fit, not pinned", Plan(workers=0, pinned=False)),
        ("fit, pinned and ahead", Plan(workers=0)),
        ("fit, 2 workers, not pinned", Plan(workers=2, pinned=False)),
        ("fit, 2 workers, pinned and ahead", Plan(workers=2)),
        ("fit, 4 workers, pinned and ahead", Plan(workers=4)),
        ("fit, 4 workers, pinned and ahead, as a graph", Plan(workers=4, graph=True, fused=True)),
    ):
        show(words, through_fit(data, rounds, plan))
    same = [
        losses(data, Plan(workers=workers, pinned=pinned))
        for workers, pinned in ((0, False), (0, None), (2, None))
    ]
    print("the losses are the same in all ways:", all(each == same[0] for each in same))


def batch_of(data: Rows, start: int) -> tuple[Tensor, Tensor]:
    samples = [data[(start + place) % SAMPLES] for place in range(BATCH_SIZE)]
    return torch.stack([row for row, _ in samples]), torch.stack([target for _, target in samples])


def computing(rounds: int) -> float:
    model = Busy(rounds).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows, target = torch.randn(BATCH_SIZE, WIDTH, device=DEVICE), torch.randn(BATCH_SIZE, 1, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(rows), target).backward()
        optimizer.step()
        torch.cuda.synchronize()

    return timed(step, 5)


def one_after_the_other(data: Rows, rounds: int) -> float:
    model = Busy(rounds).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    began = time.perf_counter()
    for step in range(STEPS):
        rows, target = (tensor.to(DEVICE) for tensor in batch_of(data, step * BATCH_SIZE))
        loss = nn.functional.mse_loss(model(rows), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    return (time.perf_counter() - began) / STEPS


def through_fit(data: Rows, rounds: int, plan: Plan) -> float:
    """Return the seconds of a step between two readings, so that the start does not count."""
    moments: list[float] = []

    def look(_: nn.Module) -> float:
        torch.cuda.synchronize()
        moments.append(time.perf_counter())
        return 0.0

    run(data, rounds, plan, steps=2 * STEPS, evaluate=look, evaluate_every=STEPS)
    return (moments[1] - moments[0]) / STEPS


def losses(data: Rows, plan: Plan) -> list[float]:
    return run(data, 1, plan, steps=8)


def run(data: Rows, rounds: int, plan: Plan, **options: Any) -> list[float]:
    torch.manual_seed(0)
    given = {"batch_size": BATCH_SIZE, "lr": 1e-4, "device": "cuda", "tune": plan, **options}
    return fit(Busy(rounds), nn.functional.mse_loss, data, **given).losses


def timed(act: Any, times: int) -> float:
    act()
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - began)
    return best


def show(words: str, seconds: float) -> None:
    print(f"{words:<46} {1e3 * seconds:7.1f} ms a step", flush=True)


if __name__ == "__main__":
    main()
