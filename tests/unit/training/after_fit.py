"""Use of a model after `fit`: train it by hand, and fit it again; run by test_after_fit.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from parallel_fit import Rows
from torch import Tensor, nn

from falaj.training.runtime.errors import TrainingError
from falaj.training.runtime.fit import fit
from gangs import run_gang
from parallel_models import FEATURES, make_model

BAD = 5
"""A sample of the second step."""


def act(options: dict[str, Any], rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # the model of rank 0 counts
    model = make_model("layers")
    bad, other = options.pop("bad", -1), options.pop("then", options["parallel"])
    found = {"first": losses_of(model, options, bad=bad), "listeners": listeners(model)}
    if any(p.is_meta for p in model.parameters()):
        return found | {"again": losses_of(model, options | {"parallel": other})}
    return found | {"hand": by_hand(model), "again": losses_of(model, options | {"parallel": other})}


def losses_of(model: nn.Module, options: dict[str, Any], *, bad: int = -1) -> list[float] | str:
    """Return the losses of three steps, or the error."""
    same: dict[str, Any] = {"batch_size": 16, "steps": 3, "seed": 3, "device": "cpu", "tune": "off"}
    try:
        return fit(model, nn.functional.mse_loss, Rows(bad=bad), **same, **options).losses
    except TrainingError as refusal:
        return str(refusal)


def by_hand(model: nn.Module) -> list[float]:
    """Run a plain loop, over the same rows in all processes."""
    rows = torch.randn(16, FEATURES, generator=torch.Generator().manual_seed(7))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(3):
        optimizer.zero_grad()
        loss: Tensor = nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def listeners(model: nn.Module) -> int:
    """Return the number of our hooks in the model and on its parameters."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    hooks += [h for p in model.parameters() for h in (p._post_accumulate_grad_hooks or {}).values()]
    return sum(hook.__module__.startswith("falaj") for hook in hooks)


def answer(requests: list[tuple[int, dict[str, Any]]], folder: Path) -> list[list[Any]]:
    return [run_gang(count, partial(act, options), folder) for count, options in requests]
