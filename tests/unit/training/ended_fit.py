"""Two processes of which one ends the run by a callback, and the next call; prints both results."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

from falaj.training.runtime.callbacks import STOP
from falaj.training.runtime.fit import fit
from gangs import run_gang


def train(folder: Path, rank: int, *, ends: bool) -> tuple[int, int, str]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = torch.randn(40, 4)
    result = fit(
        nn.Linear(4, 1),
        nn.functional.mse_loss,
        (rows, rows.sum(1, keepdim=True)),
        steps=8,
        batch_size=8,
        run=folder / "run",
        device="cpu",
        tune="off",
        callbacks=[lambda step, _: STOP if ends and rank == 1 and step == 3 else None],
    )
    return result.step, result.resumed_from, result.stopped


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(json.dumps([run_gang(2, partial(train, place, ends=ends), place) for ends in (True, False)]))
