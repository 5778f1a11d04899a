"""Parts of steps that were found before, by what they depend on: a JSON file each, beside the plans."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from falaj.training.runtime.data import Batch
from falaj.training.runtime.memory.layouts import Parts, parts_from
from falaj.training.runtime.optimizers import OptimizerChoice
from falaj.training.runtime.plan.cache import cache_folder, description_of_loss, plan_key
from falaj.training.runtime.steps import Loss

FORMAT = 2


def load_parts(key: str) -> Parts | None:
    """What was kept under `key`; None where there is nothing, or nothing that makes sense."""
    try:
        kept = json.loads(_path(key).read_text())
        return parts_from(kept["parts"]) if kept["format"] == FORMAT and kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_parts(key: str, parts: Parts) -> None:
    """Keep `parts`, all or nothing. A cache that cannot be written costs some seconds next time."""
    with suppress(OSError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_text(json.dumps({"format": FORMAT, "key": key, "parts": parts.facts()}))
        aside.replace(path)


def parts_key(
    model: nn.Module, loss: Loss, optimizer: OptimizerChoice, sample: Batch, options: dict[str, Any]
) -> str | None:
    """What parts depend on; None where it cannot be told: functions that make optimizers, losses without a source."""
    if not isinstance(optimizer, str | optim.Optimizer):
        return None
    try:
        of_loss = description_of_loss(loss)
    except (OSError, TypeError):
        return None
    own = {
        "loss": sha256(json.dumps(of_loss).encode()).hexdigest(),
        "optimizer": str(optimizer),
        "format": FORMAT,
    }
    return plan_key(model, sample, torch.device("cpu"), {**options, **own})


def _path(key: str) -> Path:
    return cache_folder() / "memory" / f"{key}.json"
