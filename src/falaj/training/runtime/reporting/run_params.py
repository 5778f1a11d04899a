"""What a run says of itself once: its options, its plan, the model, the data and the hardware, as parameters."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.options import FitOptions
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.planning.cache import cpu_name
from falaj.training.runtime.planning.plan import Plan

Values = dict[str, str | int | float | bool]


def run_params(
    model: nn.Module,
    options: FitOptions,
    chosen: Plan,
    plan: BatchPlan,
    world: ProcessGroup,
    *,
    layout: str,
    total: int,
) -> Values:
    """The parameters of a run, by short names; what was not given is left out."""
    return {
        **option_params(options),
        "batch_size": plan.batch_size,
        "total_steps": total,
        "plan": chosen.summary,
        "processes": world.size,
        **({"layout": layout} if world.size > 1 else {}),
        "data.samples": plan.samples,
        **model_params(model),
        **hardware_params(world.device),
    }


def option_params(options: FitOptions) -> Values:
    """Every option that was given or has a default, by its name in `fit`."""
    batching, optimization, compute = options.batching, options.optimization, options.compute
    evaluation, parallelism = options.evaluation, options.parallelism
    every = options.checkpoint_every
    given: Mapping[str, Any] = {
        **{field.name: getattr(optimization, field.name) for field in fields(optimization)},
        "steps": batching.steps,
        "epochs": batching.epochs,
        "seed": batching.seed,
        "drop_last": batching.drop_last or None,
        "accumulate": compute.accumulate,
        "evaluate_every": evaluation.evaluate_every,
        "patience": evaluation.patience,
        "exact": parallelism.exact or None,
        "checkpoint_every": f"{every.total_seconds():g} s" if isinstance(every, timedelta) else every,
    }
    return {name: param_value(value) for name, value in given.items() if value is not None}


def model_params(model: nn.Module) -> Values:
    every = list(model.parameters())
    return {
        "model": type(model).__name__,
        "model.parameters": sum(p.numel() for p in every),
        "model.trainable": sum(p.numel() for p in every if p.requires_grad),
    }


def hardware_params(device: torch.device) -> Values:
    """The machine, and the versions of what computes."""
    found: Values = {
        "hardware.device": device.type,
        "hardware.cpu": cpu_name(),
        "hardware.cores": usable_cores(),
        "hardware.memory_gib": round(memory_bytes() / 2**30, 1),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found |= {
            "hardware.gpu": card.name,
            "hardware.gpus": torch.cuda.device_count(),
            "hardware.gpu_memory_gib": round(card.total_memory / 2**30, 1),
            "cuda": str(torch.version.cuda),
        }
    else:
        found["hardware.threads"] = torch.get_num_threads()
    return found


def usable_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def param_value(value: Any) -> str | int | float | bool:
    """A value as a parameter has it: a function or an object by its name."""
    if isinstance(value, bool | int | float | str):
        return value
    return str(getattr(value, "__qualname__", type(value).__qualname__))
