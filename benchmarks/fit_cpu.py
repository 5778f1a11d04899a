"""CPU microseconds that `fit` adds to a step of a plain torch loop, on a small MLP with one thread."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor, nn

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.fit import fit
from harness import Result, Rule, report, say

QUICK = True
ROUNDS = 25
STEPS = 300
SAMPLES = 10_000
BATCH_SIZE = 64
GOAL_US = 100.0

Data = tuple[Tensor, Tensor]


def main() -> None:
    torch.set_num_threads(1)
    data = torch.randn(SAMPLES, 64), torch.randn(SAMPLES, 1)
    plain_loop(data), through_fit(data)  # allocator and code paths
    plain, ours, added = [], [], []
    for number in range(ROUNDS):
        first, second = (plain_loop, through_fit) if number % 2 else (through_fit, plain_loop)
        taken = {first: first(data), second: second(data)}
        plain.append(taken[plain_loop])
        ours.append(taken[through_fit])
        added.append(ours[-1] - plain[-1])
    low, high = sorted(added)[ROUNDS // 4], sorted(added)[-ROUNDS // 4]
    say(f"added per step: median {median(added):.1f} µs, half of the rounds in {low:.1f} to {high:.1f} µs")
    say(f"a step of the plain loop: {median(plain):.0f} µs, through fit: {median(ours):.0f} µs")
    what = "CPU µs that fit adds to a step (peer: a step of the plain loop)"
    report("fit_cpu", [Result(what, median(added), median(plain), goal=GOAL_US, rule=Rule.FALAJ_AT_MOST)])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def plain_loop(data: Data) -> float:
    """Return CPU microseconds per step of a plain loop, on the same batches with the same optimizer."""
    model, plan = make_model(), BatchPlan(SAMPLES, BATCH_SIZE, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = data
    start = time.process_time()
    for step in range(1, STEPS + 1):
        indices = plan.indices(step)
        loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (time.process_time() - start) / STEPS * 1e6


def through_fit(data: Data) -> float:
    """Return CPU microseconds per step of `fit` with its defaults, including its set-up."""
    model = make_model()
    start = time.process_time()
    fit(model, nn.functional.mse_loss, data, steps=STEPS, batch_size=BATCH_SIZE, seed=0, device="cpu")
    return (time.process_time() - start) / STEPS * 1e6


if __name__ == "__main__":
    main()
