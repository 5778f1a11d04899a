"""Cached memory traces, stored beside the plans."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from types import FunctionType
from typing import Any

import torch
from torch import nn, optim

from falaj.training.runtime.data.sources import Batch
from falaj.training.runtime.memory.step_memory import (
    PipelineMemory,
    StepMemory,
    pipeline_memory_from,
    step_memory_from,
)
from falaj.training.runtime.planning.cache import (
    load_entry,
    loss_fingerprint,
    plan_key,
    source_of,
    store_entry,
)
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.optimizers import OptimizerChoice

FORMAT = 3

ADDRESS = re.compile(r" at 0x[0-9a-f]+>")


def load_step_memory(key: str | None) -> StepMemory | None:
    """Return the step memory that was stored under `key`, or None."""
    return load_entry("memory", key, lambda found: step_memory_from(found["parts"]), version=FORMAT)


def load_pipeline_memory(key: str | None) -> PipelineMemory | None:
    """Return the pipeline memory that was stored under `key`, or None."""
    return load_entry("memory", key, lambda found: pipeline_memory_from(found["stages"]), version=FORMAT)


def store_step_memory(key: str | None, parts: StepMemory) -> None:
    store_entry("memory", key, {"parts": parts.facts()}, version=FORMAT)


def store_pipeline_memory(key: str | None, staged: PipelineMemory) -> None:
    store_entry("memory", key, {"stages": staged.facts()}, version=FORMAT)


def memory_key(
    model: nn.Module, loss: Loss, optimizer: OptimizerChoice, sample: Batch, options: dict[str, Any]
) -> str | None:
    """Return the cache key of a trace; None if it cannot be determined, for example for a function that makes an
    optimizer, a loss without source code, or a model that holds objects without a fingerprint."""
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
    """Return what a module holds besides plain values, tensors and modules: functions and settings.

    Raise ValueError if a value is only identified by its address.
    """
    plain_types = (bool, int, float, str, type(None), torch.Tensor, nn.Module)
    found = []
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or isinstance(value, plain_types):
            continue
        words = source_of(value) if isinstance(value, type | FunctionType) else repr(value)
        if ADDRESS.search(words):
            raise ValueError(name)
        found.append(f"{name}={words}")
    return found
