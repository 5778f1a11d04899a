"""The options of a run, in groups by the part that reads them, checked together before anything happens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch

from falaj.training.runtime.errors import Fault, InvalidTraining
from falaj.training.runtime.evaluation import Better, Evaluate
from falaj.training.runtime.optimizers import OptimizerChoice, Schedule
from falaj.training.runtime.steps import PRECISIONS, Precision


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long to train, and in which batches."""

    batch_size: int
    steps: int | None
    epochs: int | None
    drop_last: bool
    seed: int

    def faults(self) -> list[Fault]:
        faults = _whole("batch_size", self.batch_size)
        if (self.steps is None) == (self.epochs is None):
            given = f"steps={self.steps}, epochs={self.epochs}"
            faults.append(Fault("steps", given, "one of steps and epochs", "epochs=10"))
        for name, value in (("steps", self.steps), ("epochs", self.epochs)):
            faults += [] if value is None else _whole(name, value)
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 63:
            faults.append(Fault("seed", self.seed, "a whole number from 0 to 2**63 - 1"))
        return faults


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How gradients change the parameters."""

    optimizer: OptimizerChoice
    lr: float
    schedule: Schedule
    warmup: int
    clip: float | None

    def faults(self) -> list[Fault]:
        faults = _whole("warmup", self.warmup, at_least=0)
        for name, value in (("lr", self.lr), ("clip", self.clip)):
            if value is not None and not (math.isfinite(value) and value > 0):
                faults.append(Fault(name, value, "a number above 0"))
        return faults


@dataclass(frozen=True, kw_only=True)
class Computing:
    """How gradients are computed."""

    precision: Precision
    compile: bool
    accumulate: int
    device: str

    def faults(self) -> list[Fault]:
        faults = _whole("accumulate", self.accumulate)
        if self.precision not in PRECISIONS:
            faults.append(Fault("precision", self.precision, ", ".join(PRECISIONS)))
        return faults


@dataclass(frozen=True, kw_only=True)
class Looks:
    """When to evaluate, and when that ends the training."""

    evaluate: Evaluate | None
    every: int | None
    better: Better
    patience: int | None

    def faults(self) -> list[Fault]:
        faults = []
        for name, value in (("evaluate_every", self.every), ("patience", self.patience)):
            if value is not None:
                faults += _whole(name, value)
                if self.evaluate is None:
                    faults.append(
                        Fault(name, value, "only together with evaluate", "evaluate=validation_data")
                    )
        if self.better not in ("lower", "higher"):
            faults.append(Fault("better", self.better, "lower, higher"))
        return faults


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train; `fit` says what each option means."""

    pace: Pace
    updates: Updates
    computing: Computing
    looks: Looks
    checkpoint_every: int | timedelta

    def __post_init__(self) -> None:
        groups = (self.pace, self.updates, self.computing, self.looks)
        faults = [fault for group in groups for fault in group.faults()]
        if isinstance(self.checkpoint_every, timedelta):
            if self.checkpoint_every <= timedelta(0):
                faults.append(Fault("checkpoint_every", self.checkpoint_every, "steps, or a positive time"))
        else:
            faults += _whole("checkpoint_every", self.checkpoint_every)
        if not faults and self.computing.accumulate > self.pace.batch_size:
            faults.append(Fault("accumulate", self.computing.accumulate, "at most the batch size"))
        if faults:
            raise InvalidTraining("fit cannot start like this", faults=faults)


def find_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        fault = Fault("device", f"{name} ({reason})", "auto, cpu, or a device of this machine")
        raise InvalidTraining("there is no such device here", faults=[fault]) from error
    return device


def _whole(name: str, value: object, *, at_least: int = 1) -> list[Fault]:
    if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
        return []
    return [Fault(name, value, f"a whole number, at least {at_least}")]
