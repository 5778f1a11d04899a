"""The parameters that a run records: options, plan, model, data and hardware."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.dataloading.start_method import usable_cores
from falaj.training.runtime.options import FitOptions, duration_text, recorded_options
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
    """Return the parameters of a run; options that were not given are left out."""
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
    """Return the options of a run that are recorded, by their names in `fit`."""
    return {name: param_value(value) for name, value in recorded_options(options)}


def model_params(model: nn.Module) -> Values:
    every = list(model.parameters())
    return {
        "model": type(model).__name__,
        "model.parameters": sum(p.numel() for p in every),
        "model.trainable": sum(p.numel() for p in every if p.requires_grad),
    }


def hardware_params(device: torch.device) -> Values:
    """Return the hardware, and the versions of torch, Python and CUDA."""
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


def memory_bytes() -> int:
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def param_value(value: Any) -> str | int | float | bool:
    """Return a value for a parameter; functions and objects by name."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, timedelta):
        return duration_text(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))
