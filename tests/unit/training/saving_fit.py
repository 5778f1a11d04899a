"""Consecutive runs that are killed at given disk accesses while they save: FOLDER and a JSON list of runs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by the first optimizer
from torch import nn

from falaj.training.runtime.checkpointing import checkpointer
from falaj.training.runtime.fit import fit
from gangs import run_gang

assert checkpointer  # loaded once, before the forks
TOUCHES = ("fsync", "rename", "mkdir", "unlink", "rmdir")


def die_at(touch: int) -> None:
    """Kill this process before its disk access number `touch`."""
    left = [touch]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in TOUCHES:
        setattr(os, name, counted(getattr(os, name)))


def train(options: dict[str, Any], rank: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    if options.pop("plain", False):
        model[3] = nn.Identity()
    rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    if touch := options.pop("dies", {}).get(str(rank)):
        die_at(touch)
    data = rows, rows.sum(1, keepdim=True)
    mse, run = nn.functional.mse_loss, str(folder / "run") if options.pop("kept", True) else None
    result = fit(model, mse, data, batch_size=16, seed=3, device="cpu", tune="off", run=run, **options)
    return {"from": result.resumed_from, "losses": [loss.hex() for loss in result.losses]}


def run_attempt(processes: int, options: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return the output of the first process; None if one of them died."""
    first: dict[str, Any] | None = run_gang(
        processes, lambda rank: train(dict(options), rank, folder), folder, together=True
    )[0]
    return first


if __name__ == "__main__":
    where = Path(sys.argv[1])
    print(json.dumps([run_attempt(each.pop("processes"), each, where) for each in json.loads(sys.argv[2])]))
