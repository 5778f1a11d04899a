"""The check that all processes of a run were given the same arguments, which define the samples of each step.

A script with a different seed per process, or with data that is already split, would lose and repeat samples, and the
ledger of each process would still be consistent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from hashlib import sha256
from typing import Any

from torch import nn

from falaj.training.runtime.data.sources import SampleSource
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.options import FitOptions, agreed_options, duration_text
from falaj.training.runtime.parallel.process_group import ProcessGroup

FIXES = {
    "seed": "the same seed in each process",
    "samples": "pass all the data to each process: it is split at each step",
    "parameters": "build the same model in each process",
}


def require_same_arguments(
    model: nn.Module, source: SampleSource, options: FitOptions, world: ProcessGroup
) -> None:
    """Raise InvalidTraining in all processes if the arguments of one differ from those of rank 0."""
    if world.size == 1:
        return
    own = agreed_arguments(model, source, options)
    said = world.broadcast_bytes(bytearray(json.dumps(own).encode()) if world.is_leader else None)
    leaders: Mapping[str, Any] = json.loads(bytes(said or b"{}"))
    differing = [name for name, value in own.items() if leaders.get(name) != value]
    who = world.maximum(world.rank if differing else -1)
    if who < 0:
        return
    faults = [
        TrainingFault(
            name,
            f"{own[name]} in process {world.rank}",
            f"{leaders.get(name)}, as in process 0",
            fix_of(name),
        )
        for name in differing
    ]
    where = "" if differing else "; see its own error"
    raise InvalidTraining(
        f"the arguments of process {who} differ from those of process 0{where}", faults=faults
    )


def agreed_arguments(model: nn.Module, source: SampleSource, options: FitOptions) -> dict[str, Any]:
    """Return everything that must be equal in all processes, as JSON values by the names of the options."""
    shapes = [[name, list(each.shape), str(each.dtype)] for name, each in model.named_parameters()]
    values = {
        "samples": len(source),
        "parameters": sha256(json.dumps(shapes).encode()).hexdigest()[:12],
        **agreed_options(options),
    }
    return {name: json_value(value) for name, value in values.items()}


def json_value(value: Any) -> Any:
    """Return `value` for JSON; other types by their name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): json_value(each) for key, each in value.items()}
    return type(value).__name__


def fix_of(name: str) -> str:
    return FIXES.get(name, f"the same {name} in each process")
