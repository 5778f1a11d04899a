"""Whether all processes of a run were told the same: the samples of a step are a function of what they were told.

A script that seeds each process otherwise, or cuts its data before, would lose samples and repeat others, and the
ledger of each process would still add up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from hashlib import sha256
from typing import Any

from torch import nn

from falaj.training.runtime.data import Source
from falaj.training.runtime.errors import Fault, InvalidTraining
from falaj.training.runtime.settings import Settings
from falaj.training.runtime.world import World

FIXES = {
    "seed": "the same seed in each process",
    "samples": "hand each process all the data: each step takes its own part of it",
    "parameters": "build the same model in each process",
}


def require_agreement(model: nn.Module, source: Source, settings: Settings, world: World) -> None:
    """Refuse, in all processes, a run of which some were told otherwise than the leading one."""
    if world.size == 1:
        return
    own = what_was_told(model, source, settings)
    said = world.share_bytes(bytearray(json.dumps(own).encode()) if world.leads else None)
    leaders: Mapping[str, Any] = json.loads(bytes(said or b"{}"))
    differing = [name for name, value in own.items() if leaders.get(name) != value]
    who = world.most(world.rank if differing else -1)
    if who < 0:
        return
    faults = [
        Fault(
            name,
            f"{own[name]} in process {world.rank}",
            f"{leaders.get(name)}, as in process 0",
            fix_of(name),
        )
        for name in differing
    ]
    where = "" if differing else "; its own error says what"
    raise InvalidTraining(f"process {who} was told otherwise than process 0{where}", faults=faults)


def what_was_told(model: nn.Module, source: Source, settings: Settings) -> dict[str, Any]:
    """All that must be the same, by the names of the options, as plain values."""
    pace, updates, computing = settings.pace, settings.updates, settings.computing
    spreading, looks = settings.spreading, settings.looks
    shapes = [[name, list(each.shape), str(each.dtype)] for name, each in model.named_parameters()]
    told = {
        "samples": len(source),
        "parameters": sha256(json.dumps(shapes).encode()).hexdigest()[:12],
        **{name: getattr(pace, name) for name in ("batch_size", "seed", "drop_last", "steps", "epochs")},
        **{name: getattr(updates, name) for name in ("optimizer", "lr", "schedule", "warmup", "clip")},
        **{name: getattr(computing, name) for name in ("precision", "accumulate", "compile")},
        **{name: getattr(spreading, name) for name in ("parallel", "exact", "tensor_plan", "pipeline_cuts")},
        **{name: getattr(looks, name) for name in ("evaluate", "better", "patience")},
        "evaluate_every": looks.every,
        "checkpoint_every": settings.checkpoint_every,
        "checkpoint_keep": settings.checkpoint_keep,
    }
    return {name: plain(value) for name, value in told.items()}


def plain(value: Any) -> Any:
    """`value` for JSON; of what is neither a number nor a text, its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return type(value).__name__


def fix_of(name: str) -> str:
    return FIXES.get(name, f"the same {name} in each process")
