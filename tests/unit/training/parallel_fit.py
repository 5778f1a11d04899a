"""Runs over several processes, one after the other, and their outcomes; used by parallel_runs.py."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from falaj.training.runtime.errors import TrainingError
from falaj.training.runtime.fit import fit
from falaj.training.runtime.step.non_persistent_buffers import local_buffers
from gangs import run_gang
from parallel_models import FEATURES, make_model

SAMPLES = 92


class Rows:
    """Samples with augmentation; reading the `deadly` one kills the process, the `bad` one has an infinite value."""

    def __init__(self, samples: int = SAMPLES, *, deadly: int = 0, bad: int = -1, noise: float = 0.1) -> None:
        self._rows = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(1))
        self._left, self._noise = deadly, noise
        if bad >= 0:
            self._rows[bad] = torch.inf

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        row = self._rows[index] + self._noise * torch.randn(FEATURES)
        return row, row.sum().reshape(1)


def train(options: dict[str, Any], rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # each process begins with another model: that of rank 0 counts
    traits = {name: options.pop(name) for name in ("dropout", "unused", "a_step") if name in options}
    model = make_model(options.pop("model", "net"), **traits)
    deadly = options.pop("deadly", {}).get(str(rank), 0)
    changes = {name: options.pop(name) for name in ("bad", "noise") if name in options}
    rows = Rows(options.pop("samples", SAMPLES), deadly=deadly, **changes)
    if options.get("evaluate") == "data":
        options["evaluate"] = Rows(21)
    elif options.get("evaluate") == "function":
        options["evaluate"] = norm_of
    if options.pop("stop", False):
        options["callbacks"] = [
            lambda step, _: os.kill(os.getpid(), signal.SIGTERM) if step == 4 and rank else None
        ]
    if options.get("optimizer") == "made":
        options["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options.pop("thaw", False):
        model.first.requires_grad_(False)
        options["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options["callbacks"] = [lambda step, _: model.first.requires_grad_(step > 3)]
    measure = wide_loss if options.pop("wide_loss", False) else loss
    options = {"clip": 1.0, "device": "cpu", "tune": "off"} | options
    result = fit(model, measure, rows, seed=3, **options)
    held = [*model.state_dict().values(), *(buffer for _, buffer in local_buffers(model, measure))]
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in held]
    total = sum(float(w.double().sum()) for w in weights)
    losses = [each.hex() for each in result.losses]
    return {
        "losses": losses,
        "weights": total.hex(),
        "ledger": result.ledger,
        "step": result.step,
        "from": result.resumed_from,
        "stopped": result.stopped,
        "best": result.best.score.hex() if result.best else None,
    }


def loss(output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[0] if isinstance(output, tuple) else output, target)


def wide_loss(output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
    return loss(output, target).double()


def norm_of(model: nn.Module) -> float:
    """A score that needs the whole model, and to run it."""
    assert not model.training
    return float(model(torch.ones(3, FEATURES)).square().sum())


def report_of(options: dict[str, Any], rank: int) -> dict[str, Any]:
    try:
        return train(dict(options), rank)
    except TrainingError as refusal:
        return {"refused": str(refusal)}


def answer(requests: list[tuple[int, dict[str, Any]]], folder: Path) -> list[list[Any]]:
    return [
        run_gang(count, partial(report_of, options), folder, together=True) for count, options in requests
    ]
