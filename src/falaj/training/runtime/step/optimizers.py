"""Optimizers by name, and learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal, TypeAlias

from torch import nn, optim

from falaj.training.runtime.errors import InvalidTraining, TrainingFault

OptimizerName = Literal["adamw", "adam", "sgd", "momentum"]
OptimizerChoice: TypeAlias = (
    OptimizerName | optim.Optimizer | Callable[[Iterable[nn.Parameter]], optim.Optimizer]
)

ScheduleName = Literal["constant", "linear", "cosine"]
Schedule: TypeAlias = ScheduleName | Callable[[int], float]
"""A name, or a function from the step (from 1) to the factor that the learning rate is multiplied by."""

_OPTIMIZERS: Mapping[str, Callable[..., optim.Optimizer]] = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "sgd": optim.SGD,
    "momentum": partial(optim.SGD, momentum=0.9),
}
_DECAYS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def make_optimizer(
    choice: OptimizerChoice,
    parameters: list[nn.Parameter],
    *,
    lr: float,
    fused: bool = False,
    capturable: bool = False,
) -> optim.Optimizer:
    """Return the optimizer for `parameters`. One that the caller made keeps its learning rate and kernels."""
    if isinstance(choice, optim.Optimizer):
        return choice
    if callable(choice):
        return _required_optimizer(choice(parameters))
    if faults := optimizer_faults(choice):
        raise InvalidTraining("unknown optimizer", faults=faults)
    options: dict[str, bool] = {"fused": True} if fused else {}
    if capturable and choice in ("adamw", "adam"):
        options["capturable"] = True
    return _OPTIMIZERS[choice](parameters, lr=lr, **options)


def _required_optimizer(made: object) -> optim.Optimizer:
    """Return `made` if it is an optimizer; raise InvalidTraining otherwise."""
    if isinstance(made, optim.Optimizer):
        return made
    fix = "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
    given = f"a function that returns {made!r}"
    fault = TrainingFault("optimizer", given, "a function from parameters to a torch.optim.Optimizer", fix)
    raise InvalidTraining("the optimizer function did not return an optimizer", faults=[fault])


def optimizer_faults(choice: object) -> list[TrainingFault]:
    if isinstance(choice, optim.Optimizer) or callable(choice) or _is_one_of(choice, _OPTIMIZERS):
        return []
    allowed = f"{', '.join(_OPTIMIZERS)}, an optimizer, or a function from parameters to one"
    return [TrainingFault("optimizer", choice, allowed, 'optimizer="adamw"')]


def schedule_faults(choice: object) -> list[TrainingFault]:
    if _is_one_of(choice, _DECAYS) or (callable(choice) and _takes_one(choice)):
        return []
    allowed = f"{', '.join(_DECAYS)}, or a function from the step to a factor"
    given = "a function with other parameters than the step" if callable(choice) else choice
    return [
        TrainingFault("schedule", given, allowed, 'schedule="cosine", or schedule=lambda step: 0.9**step')
    ]


def _takes_one(function: Callable[..., object]) -> bool:
    """Return whether `function` accepts one argument; True where the signature is unknown."""
    try:
        inspect.signature(function).bind(1)
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def _is_one_of(choice: object, words: Mapping[str, object]) -> bool:
    return isinstance(choice, str) and choice in words


def make_schedule(choice: Schedule, *, warmup: int, steps: int) -> Callable[[int], float] | None:
    """Return the learning-rate factor by step: linear warmup, then `choice`. None where it is always 1."""
    if callable(choice):
        return partial(_factor_by, choice)
    if faults := schedule_faults(choice):
        raise InvalidTraining("unknown schedule", faults=faults)
    if choice == "constant" and not warmup:
        return None
    decay = _DECAYS[choice]

    def factor(step: int) -> float:
        if step <= warmup:
            return step / warmup
        return decay((step - warmup - 1) / max(1, steps - warmup))

    return factor


def _factor_by(schedule: Callable[[int], float], step: int) -> float:
    """Return the factor that the user's schedule gives for `step`; raise InvalidTraining if it is not finite."""
    given = schedule(step)
    try:
        factor = math.nan if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError):
        factor = math.nan
    if math.isfinite(factor):
        return factor
    fault = TrainingFault(
        "schedule", f"{given!r} for step {step}", "a finite number", "schedule=lambda step: 0.9**step"
    )
    raise InvalidTraining("the schedule did not return a factor for the learning rate", faults=[fault])
