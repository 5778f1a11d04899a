"""The options of a run, in groups by the part that reads them, checked together before anything happens."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

import torch

from falaj.training.runtime.errors import Fault, InvalidTraining
from falaj.training.runtime.evaluation import Better, Evaluate
from falaj.training.runtime.optimizers import OptimizerChoice, Schedule
from falaj.training.runtime.plan.nvml import cuda_is_there
from falaj.training.runtime.plan.plans import MODES, PRECISIONS, CompileMode, Plan, Precision
from falaj.training.runtime.spread.layout import Parallel
from falaj.training.runtime.spread.tensor_plan import TensorPlan

MICRO_BATCHES_OF_EXACT = 8
BATCH_SIZE_TO_START_FROM = 32

BatchSize: TypeAlias = int | Literal["auto"]
Tune: TypeAlias = Literal["auto", "off"] | Plan
"""auto: search, where the run is long enough to gain by it; off: compute as the options say; or the plan itself."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long to train, and in which batches."""

    batch_size: BatchSize
    steps: int | None
    epochs: int | None
    drop_last: bool
    seed: int

    def faults(self) -> list[Fault]:
        faults = [] if self.batch_size == "auto" else _whole("batch_size", self.batch_size)
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
    """How gradients are computed. What is None is left to the search; without one it is the plain way."""

    precision: Precision | None
    compile: bool | CompileMode | None
    accumulate: int | None
    device: str
    tune: Tune = "off"
    tune_seconds: float | None = None

    def faults(self) -> list[Fault]:
        faults = [] if self.accumulate is None else _whole("accumulate", self.accumulate)
        if self.precision is not None and self.precision not in PRECISIONS:
            faults.append(Fault("precision", self.precision, ", ".join(PRECISIONS)))
        if not isinstance(self.compile, bool | None) and self.compile not in MODES:
            faults.append(Fault("compile", self.compile, f"True, False, {', '.join(MODES)}"))
        if not isinstance(self.tune, Plan) and self.tune not in ("auto", "off"):
            faults.append(Fault("tune", self.tune, "auto, off, or a Plan"))
        if self.tune_seconds is not None and not self.tune_seconds > 0:
            faults.append(Fault("tune_seconds", self.tune_seconds, "a number above 0"))
        return faults

    @property
    def fixed(self) -> dict[str, str | int]:
        """What the caller has decided, by the names that a plan has for it."""
        found: dict[str, str | int] = {}
        if self.precision is not None:
            found["precision"] = self.precision
        if self.compile is not None:
            words = {"True": "default", "False": "off"}
            found["compile"] = words.get(str(self.compile), str(self.compile))
        if self.accumulate is not None:
            found["micro_batches"] = self.accumulate
        return found


@dataclass(frozen=True, kw_only=True)
class Spreading:
    """How the model is spread over processes."""

    parallel: Parallel = "auto"
    tensor_plan: TensorPlan | None = None
    exact: bool = False

    def faults(self) -> list[Fault]:
        if self.exact and self.parallel not in ("auto", "ddp"):
            return [Fault("exact", f"with parallel={self.parallel}", "parallel=ddp or auto")]
        return []


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
    spreading: Spreading = Spreading()

    @property
    def micro_batches(self) -> int:
        """How many a global batch is cut into, at least; an exact run has the same number whoever trains it."""
        asked = self.computing.accumulate or 1
        return MICRO_BATCHES_OF_EXACT if self.spreading.exact and asked == 1 else asked

    def __post_init__(self) -> None:
        groups = (self.pace, self.updates, self.computing, self.spreading, self.looks)
        faults = [fault for group in groups for fault in group.faults()]
        if isinstance(self.checkpoint_every, timedelta):
            if self.checkpoint_every <= timedelta(0):
                faults.append(Fault("checkpoint_every", self.checkpoint_every, "steps, or a positive time"))
        else:
            faults += _whole("checkpoint_every", self.checkpoint_every)
        if not faults and self.spreading.exact and self.micro_batches & (self.micro_batches - 1):
            faults.append(Fault("accumulate", self.micro_batches, "a power of two, with exact=True"))
        batch_size, accumulate = self.pace.batch_size, self.computing.accumulate
        if not faults and batch_size != "auto" and (accumulate or 1) > batch_size:
            faults.append(Fault("accumulate", accumulate, "at most the batch size"))
        if faults:
            raise InvalidTraining("fit cannot start like this", faults=faults)


def find_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the GPU if there is one. CUDA is not started: a search may want to fork."""
    if name == "auto" and not cuda_is_there():
        return torch.device("cpu")
    if name in ("auto", "cuda") and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    name = "cuda" if name == "auto" else name
    try:
        device = torch.device(name)
        if device.type != "cuda" or not cuda_is_there():
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
