"""Runs over several processes on each kind of data, and their losses; used by test_parallel_kinds.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from falaj.training.runtime.errors import TrainingError
from falaj.training.runtime.fit import fit
from gangs import run_gang

ROWS, FEATURES = 44, 8


class OwnLoss(nn.Module):
    """A model that computes its loss, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(self.act(self.first(x)))
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class Named(OwnLoss):
    """A model whose input has a name."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = self.last(self.act(self.first(x)))
        return found


def train(options: dict[str, Any], rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind = options.pop("kind")
    model, loss, data, named = parts(kind, rank)
    evaluate = data if options.pop("evaluate", False) else None
    options = {"device": "cpu", "tune": "off", "steps": 6, **named, **options}
    if evaluate is not None:
        options |= {"evaluate": evaluate, "evaluate_every": 3}
    result = fit(model, loss, data, seed=3, **options)
    best = result.best.score if result.best else None
    return {"losses": result.losses, "best": best, "from": result.resumed_from}


def parts(kind: str, rank: int) -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    x = np.random.default_rng(1).standard_normal((ROWS, FEATURES)).astype("float32")
    y = x.sum(1, keepdims=True)
    columns = {**{f"f{place}": x[:, place] for place in range(FEATURES)}, "y": y[:, 0]}
    samples: list[Any] = list(zip(torch.from_numpy(x), torch.from_numpy(y), strict=True))
    sized = {"batch_size": 8}
    mse = nn.functional.mse_loss
    if kind == "own loss":
        return OwnLoss(), None, {"x": x, "labels": y}, sized
    if kind == "function of the output":
        return OwnLoss(), lambda output: output["loss"], [{"x": a, "labels": b} for a, b in samples], sized
    if kind == "loader":
        sampler: Any = DistributedSampler(samples, num_replicas=2, rank=rank % 2)  # type: ignore[arg-type]
        return Named(), mse, DataLoader(samples, batch_size=8, sampler=sampler), {}  # type: ignore[arg-type]
    data: dict[str, Any] = {
        "tensors": (torch.from_numpy(x), torch.from_numpy(y)),
        "arrays": (x, y),
        "pandas": pd.DataFrame(columns),
        "polars": pl.DataFrame(columns),
        "dict": {"x": x, "y": y},
    }
    named = {} if kind in ("tensors", "arrays") else {"target": "y"}
    return Named(), mse, data[kind], sized | named


def report_of(options: dict[str, Any], rank: int) -> dict[str, Any]:
    try:
        return train(dict(options), rank)
    except TrainingError as refusal:
        return {"refused": str(refusal)}


def answer(requests: list[tuple[int, dict[str, Any]]], folder: Path) -> list[list[Any]]:
    return [
        run_gang(count, partial(report_of, options), folder, together=True) for count, options in requests
    ]
