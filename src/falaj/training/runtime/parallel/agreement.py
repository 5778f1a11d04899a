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

from falaj.training.runtime.data.sources import SampleSource
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.options import FitOptions
from falaj.training.runtime.parallel.process_group import ProcessGroup

FIXES = {
    "seed": "the same seed in each process",
    "samples": "hand each process all the data: each step takes its own part of it",
    "parameters": "build the same model in each process",
}


def require_same_arguments(
    model: nn.Module, source: SampleSource, options: FitOptions, world: ProcessGroup
) -> None:
    """Refuse, in all processes, a run of which some were told otherwise than the leading one."""
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
    where = "" if differing else "; its own error says what"
    raise InvalidTraining(f"process {who} was told otherwise than process 0{where}", faults=faults)


def agreed_arguments(model: nn.Module, source: SampleSource, options: FitOptions) -> dict[str, Any]:
    """All that must be the same, by the names of the options, as plain values."""
    batching, optimization, compute = options.batching, options.optimization, options.compute
    parallelism, evaluation = options.parallelism, options.evaluation
    shapes = [[name, list(each.shape), str(each.dtype)] for name, each in model.named_parameters()]
    told = {
        "samples": len(source),
        "parameters": sha256(json.dumps(shapes).encode()).hexdigest()[:12],
        **{name: getattr(batching, name) for name in ("batch_size", "seed", "drop_last", "steps", "epochs")},
        **{name: getattr(optimization, name) for name in ("optimizer", "lr", "schedule", "warmup", "clip")},
        **{name: getattr(compute, name) for name in ("precision", "accumulate", "compile")},
        **{
            name: getattr(parallelism, name) for name in ("parallel", "exact", "tensor_plan", "pipeline_cuts")
        },
        **{name: getattr(evaluation, name) for name in ("evaluate", "better", "patience")},
        "evaluate_every": evaluation.evaluate_every,
        "checkpoint_every": options.checkpoint_every,
        "checkpoint_keep": options.checkpoint_keep,
    }
    return {name: json_value(value) for name, value in told.items()}


def json_value(value: Any) -> Any:
    """`value` for JSON; of what is neither a number nor a text, its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): json_value(each) for key, each in value.items()}
    return type(value).__name__


def fix_of(name: str) -> str:
    return FIXES.get(name, f"the same {name} in each process")
