"""Parts of steps that were found before, by what they depend on: a JSON file each, beside the plans."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn, optim

from falaj.training.runtime.data.sources import Batch
from falaj.training.runtime.memory.step_memory import (
    PipelineMemory,
    StepMemory,
    pipeline_memory_from,
    step_memory_from,
)
from falaj.training.runtime.planning.cache import cache_folder, loss_fingerprint, plan_key, source_of
from falaj.training.runtime.step.optimizers import OptimizerChoice
from falaj.training.runtime.step.step import Loss

FORMAT = 3

ADDRESS = re.compile(r" at 0x[0-9a-f]+>")

Found = TypeVar("Found")


def load_step_memory(key: str | None) -> StepMemory | None:
    """What was kept under `key`; None where there is nothing, or nothing that makes sense."""
    return _load(key, "parts", step_memory_from)


def load_pipeline_memory(key: str | None) -> PipelineMemory | None:
    return _load(key, "stages", pipeline_memory_from)


def store_step_memory(key: str | None, parts: StepMemory) -> None:
    _keep(key, {"parts": parts.facts()})


def store_pipeline_memory(key: str | None, staged: PipelineMemory) -> None:
    _keep(key, {"stages": staged.facts()})


def _load(key: str | None, name: str, read: Callable[[dict[str, Any]], Found]) -> Found | None:
    if key is None:
        return None
    try:
        kept = json.loads(_path(key).read_text())
        return read(kept[name]) if kept["format"] == FORMAT and kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(key: str | None, facts: dict[str, Any]) -> None:
    """All or nothing. A cache that cannot be written costs some seconds next time."""
    if key is None:
        return
    with suppress(OSError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_text(json.dumps({"format": FORMAT, "key": key, **facts}))
        aside.replace(path)


def memory_key(
    model: nn.Module, loss: Loss, optimizer: OptimizerChoice, sample: Batch, options: dict[str, Any]
) -> str | None:
    """What parts depend on; None where it cannot be told: functions that make optimizers, losses without a source,
    models that hold objects of which nothing can be said."""
    if not isinstance(optimizer, str | optim.Optimizer):
        return None
    try:
        of_loss, more = loss_fingerprint(loss), [module_settings(module) for module in model.modules()]
    except (OSError, TypeError, ValueError):
        return None
    own = {
        "held": sha256(json.dumps(more).encode()).hexdigest(),
        "trained": [parameter.requires_grad for parameter in model.parameters()],
        "loss": sha256(json.dumps(of_loss).encode()).hexdigest(),
        "optimizer": str(optimizer),
        "format": FORMAT,
    }
    return plan_key(model, sample, torch.device("cpu"), {**options, **own})


def module_settings(module: nn.Module) -> list[str]:
    """What it holds beside plain values, tensors and modules, which may change what it does: functions and settings.

    ValueError where something would be told by its address alone.
    """
    told = (bool, int, float, str, type(None), torch.Tensor, nn.Module)
    found = []
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or isinstance(value, told):
            continue
        words = source_of(value) if isinstance(value, type | FunctionType) else repr(value)
        if ADDRESS.search(words):
            raise ValueError(name)
        found.append(f"{name}={words}")
    return found


def _path(key: str) -> Path:
    return cache_folder() / "memory" / f"{key}.json"
