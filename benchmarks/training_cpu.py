"""Training on a CPU: `fit` with its defaults against a plain torch loop, on three small models.

Both sides alternate on the same batches in many short rounds, after the plan search; ratios are taken per round.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from statistics import median
from typing import Any

import torch
from torch import nn

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.fit import fit
from falaj.training.runtime.planning.plan import Plan
from harness import Result, Rule, report, say
from training_models import SMALL, Work

ROUNDS = 11
TURN_S = 0.6
TUNE_S = 45.0
AT_WORST = 0.97
OVERHEAD_US = 50.0


def main() -> None:
    os.environ["FALAJ_CACHE"] = tempfile.mkdtemp()
    results = [compare(work) for work in SMALL]
    best = max(result.ratio for result in results)
    what = "best of the three: rows, images or tokens/s"
    results.append(Result(what, best, 1.0, goal=1.0, rule=Rule.RATIO_AT_LEAST))
    results.append(overhead())
    report("training_cpu", results)


def compare(work: Work) -> Result:
    """Return samples per second of `fit`, and of the plain loop."""
    data = work.data()
    plan = searched(work, data)
    steps = steps_of_a_turn(work, data)
    plain_loop(work, data, steps), through_fit(work, data, steps, plan)
    rates = []
    for number in range(ROUNDS):
        if number % 2:
            plain = plain_loop(work, data, steps)
            rates.append((through_fit(work, data, steps, plan), plain))
        else:
            ours = through_fit(work, data, steps, plan)
            rates.append((ours, plain_loop(work, data, steps)))
    ratios = sorted(ours / plain for ours, plain in rates)
    low, high = ratios[ROUNDS // 4], ratios[-ROUNDS // 4]
    say(
        f"{work.name}: {plan.summary}; fit / plain: median {median(ratios):.2f}, half in {low:.2f} to {high:.2f}"
    )
    plain = median(plain for _, plain in rates) * work.each
    what = f"{work.name}: {work.unit}/s"
    return Result(what, plain * median(ratios), plain, goal=AT_WORST, rule=Rule.RATIO_AT_LEAST)


def searched(work: Work, data: Any) -> Plan:
    """Return the plan that `fit` finds for this model here."""
    torch.manual_seed(0)
    with contextlib.redirect_stdout(sys.stderr):
        found = fit(
            work.make(),
            work.loss,
            data,
            batch_size=work.batch,
            steps=2,
            lr=work.lr,
            device="cpu",
            tune_seconds=TUNE_S,
        )
    return found.plan


def steps_of_a_turn(work: Work, data: Any) -> int:
    rate = plain_loop(work, data, 5)
    return max(5, int(TURN_S * rate / work.batch))


def plain_loop(work: Work, data: Any, steps: int) -> float:
    torch.manual_seed(0)
    model, plan = work.make(), BatchPlan(len(data[0]), work.batch, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr)
    inputs, targets = data
    began = time.perf_counter()
    for step in range(1, steps + 1):
        indices = plan.indices(step)
        loss = work.loss(model(inputs[indices]), targets[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return steps * work.batch / (time.perf_counter() - began)


def through_fit(work: Work, data: Any, steps: int, plan: Plan) -> float:
    """Run `fit` without counting compilation, which ends with the first step."""
    torch.manual_seed(0)
    model = work.make()
    if plan.compile != "off":
        return between_looks(work, model, data, steps, plan)
    began = time.perf_counter()
    train(work, model, data, steps=steps, tune=plan)
    return steps * work.batch / (time.perf_counter() - began)


def between_looks(work: Work, model: nn.Module, data: Any, steps: int, plan: Plan) -> float:
    moments: list[float] = []

    def look(_: nn.Module) -> float:
        moments.append(time.perf_counter())
        return 0.0

    train(work, model, data, steps=2 * steps, tune=plan, evaluate=look, evaluate_every=steps)
    return steps * work.batch / (moments[1] - moments[0])


def train(work: Work, model: nn.Module, data: Any, **options: Any) -> None:
    fit(model, work.loss, data, batch_size=work.batch, lr=work.lr, device="cpu", **options)


def overhead() -> Result:
    """Return CPU microseconds that `fit` adds to a step of a small model, as in fit_cpu."""
    import fit_cpu

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = torch.randn(fit_cpu.SAMPLES, 64), torch.randn(fit_cpu.SAMPLES, 1)
    fit_cpu.plain_loop(data), fit_cpu.through_fit(data)
    pairs = [(fit_cpu.plain_loop(data), fit_cpu.through_fit(data)) for _ in range(fit_cpu.ROUNDS)]
    torch.set_num_threads(threads)
    added = median(ours - plain for plain, ours in pairs)
    plain = median(plain for plain, _ in pairs)
    what = "CPU µs that fit adds to a step (peer: a step of the plain loop)"
    return Result(what, added, plain, goal=OVERHEAD_US, rule=Rule.FALAJ_AT_MOST)


if __name__ == "__main__":
    main()
