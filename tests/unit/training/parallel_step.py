"""`fj.step` in several processes, each with its share of every batch; prints the losses as JSON."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import falaj as fj
from falaj.training.runtime.data.batches import BatchPlan
from gangs import run_gang

SAMPLES, BATCH, STEPS = 40, 8, 6


def losses(rank: int, size: int, options: dict[str, Any]) -> list[float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 4)
    target = inputs.sum(1, keepdim=True)
    torch.manual_seed(rank)  # the model of rank 0 counts
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    step = fj.step(model, nn.functional.mse_loss, clip=1.0, device="cpu", **options)
    plan, found = BatchPlan(SAMPLES, BATCH, seed=0), []
    for number in range(1, STEPS + 1):
        own = plan.indices(number)[rank * BATCH // size : (rank + 1) * BATCH // size]
        found.append(step((inputs[own], target[own])).item())
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    ways = [
        run_gang(size, partial(losses, size=size, options=options), folder)
        for size, options in json.loads(sys.argv[1])
    ]
    print(json.dumps(ways))
