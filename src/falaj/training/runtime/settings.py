"""The options of a run, in groups by the part that reads them, checked together before anything happens."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal, TypeAlias

import torch

from falaj.training.runtime.agent.agents import run_faults
from falaj.training.runtime.callbacks import Callback, callback_faults
from falaj.training.runtime.checkpointing.storage.store import MAX_KEPT
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.evaluation import Better, Evaluate, evaluate_faults
from falaj.training.runtime.parallel.layout import AXES, Parallel, parallel_layout
from falaj.training.runtime.parallel.tensor_plan import TensorPlan
from falaj.training.runtime.planning.nvml import is_cuda_available
from falaj.training.runtime.planning.plan import COMPILE_MODES, PRECISIONS, CompileMode, Plan, Precision
from falaj.training.runtime.showing import ReportingOptions
from falaj.training.runtime.step.optimizers import (
    OptimizerChoice,
    Schedule,
    optimizer_faults,
    schedule_faults,
)

EXACT_MICRO_BATCHES = 8
INITIAL_BATCH_SIZE = 32

BatchSize: TypeAlias = int | Literal["auto"]
Tune: TypeAlias = Literal["auto", "off"] | Plan
"""auto: search, where the run is long enough to gain by it; off: compute as the options say; or the plan itself."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How long to train, and in which batches."""

    batch_size: BatchSize
    steps: int | None
    epochs: int | None
    drop_last: bool
    seed: int

    def faults(self) -> list[TrainingFault]:
        faults = [] if self.batch_size == "auto" else _whole("batch_size", self.batch_size)
        if (self.steps is None) == (self.epochs is None):
            given = f"steps={self.steps}, epochs={self.epochs}"
            faults.append(TrainingFault("steps", given, "one of steps and epochs", "epochs=10"))
        for name, value in (("steps", self.steps), ("epochs", self.epochs)):
            faults += [] if value is None else _whole(name, value)
        if _whole("seed", self.seed, at_least=0) or self.seed >= 1 << 63:
            faults.append(TrainingFault("seed", self.seed, "a whole number from 0 to 2**63 - 1"))
        return faults + _flag("drop_last", self.drop_last)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """How gradients change the parameters."""

    optimizer: OptimizerChoice
    lr: float
    schedule: Schedule
    warmup: int
    clip: float | None

    def faults(self) -> list[TrainingFault]:
        faults = optimizer_faults(self.optimizer) + schedule_faults(self.schedule)
        faults += _whole("warmup", self.warmup, at_least=0) + _above_0("lr", self.lr)
        return faults + ([] if self.clip is None else _above_0("clip", self.clip))


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How gradients are computed. What is None is left to the search; without one it is the plain way."""

    precision: Precision | None
    compile: bool | CompileMode | None
    accumulate: int | None
    device: str
    tune: Tune = "off"
    tune_seconds: float | None = None

    def faults(self) -> list[TrainingFault]:
        faults = [] if self.accumulate is None else _whole("accumulate", self.accumulate)
        if self.precision is not None and not _is_word(self.precision, PRECISIONS):
            faults.append(TrainingFault("precision", self.precision, ", ".join(PRECISIONS)))
        if not isinstance(self.compile, bool | None) and not _is_word(self.compile, COMPILE_MODES):
            faults.append(TrainingFault("compile", self.compile, f"True, False, {', '.join(COMPILE_MODES)}"))
        if not isinstance(self.tune, Plan) and not _is_word(self.tune, ("auto", "off")):
            faults.append(TrainingFault("tune", self.tune, "auto, off, or a Plan"))
        if self.tune_seconds is not None:
            faults += _above_0("tune_seconds", self.tune_seconds)
        return faults + device_faults(self.device)

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
class ParallelOptions:
    """How the model is spread over processes."""

    parallel: Parallel = "auto"
    tensor_plan: TensorPlan | None = None
    pipeline_cuts: Sequence[str] | None = None
    exact: bool = False
    memory: int | None = None
    """The bytes that a process may use, where that is not all that its device has."""

    def faults(self) -> list[TrainingFault]:
        faults = parallel_faults(self.parallel) + _flag("exact", self.exact)
        cuts = self.pipeline_cuts
        if cuts is not None and not _are_words(cuts):
            faults.append(TrainingFault("pipeline_cuts", cuts, "a list of names of layers"))
        if self.tensor_plan is not None and not _are_cuts(self.tensor_plan):
            faults.append(
                TrainingFault("tensor_plan", self.tensor_plan, "names of linear layers, each column or row")
            )
        faults += [] if self.memory is None else _whole("memory", self.memory)
        if not faults and self.exact and self.parallel not in ("auto", "ddp"):
            return [TrainingFault("exact", f"with parallel={self.parallel}", "parallel=ddp or auto")]
        return faults


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """When to evaluate, and when that ends the training."""

    evaluate: Evaluate | None
    evaluate_every: int | None
    better: Better
    patience: int | None

    def faults(self) -> list[TrainingFault]:
        faults = evaluate_faults(self.evaluate)
        for name, value in (("evaluate_every", self.evaluate_every), ("patience", self.patience)):
            if value is not None:
                faults += _whole(name, value)
                if self.evaluate is None:
                    faults.append(
                        TrainingFault(name, value, "only together with evaluate", "evaluate=validation_data")
                    )
        if not _is_word(self.better, ("lower", "higher")):
            faults.append(TrainingFault("better", self.better, "lower, higher"))
        return faults


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How the samples of a dataset are read. What is "auto" is measured, by the search or when the run starts."""

    workers: int | Literal["auto"] = "auto"
    prefetch: int | Literal["auto"] = "auto"

    def faults(self) -> list[TrainingFault]:
        faults = [] if self.workers == "auto" else _whole("workers", self.workers, at_least=0)
        return faults + ([] if self.prefetch == "auto" else _whole("prefetch", self.prefetch))

    @property
    def fixed(self) -> dict[str, str | int]:
        """What the caller has decided, by the names that a plan has for it."""
        given = {"workers": self.workers, "prefetch": self.prefetch}
        return {name: value for name, value in given.items() if value != "auto"}


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How to train; `fit` says what each option means."""

    batching: BatchOptions
    optimization: OptimizerOptions
    compute: ComputeOptions
    evaluation: EvaluationOptions
    checkpoint_every: int | timedelta
    checkpoint_keep: int = 3
    parallelism: ParallelOptions = ParallelOptions()
    data: DataOptions = DataOptions()
    callbacks: Sequence[Callback] = ()
    reporting: ReportingOptions = field(default_factory=ReportingOptions)

    @property
    def micro_batches(self) -> int:
        """How many a global batch is cut into, at least; an exact run has the same number whoever trains it."""
        asked = self.compute.accumulate or 1
        return EXACT_MICRO_BATCHES if self.parallelism.exact and asked == 1 else asked

    def micro_batches_over(self, processes: int) -> int:
        """As `micro_batches`; unless the caller says how many, a pipeline has two for each stage to be busy with."""
        layout, batch_size = parallel_layout(self.parallelism.parallel, processes), self.batching.batch_size
        if layout.pipeline == 1 or self.compute.accumulate is not None:
            return self.micro_batches
        least = 2 * layout.pipeline * layout.data
        return least if batch_size == "auto" else min(least, batch_size)

    @property
    def fixed(self) -> dict[str, str | int]:
        """What the caller has decided of a plan."""
        return {**self.compute.fixed, **self.data.fixed}

    def __post_init__(self) -> None:
        groups = (
            self.batching,
            self.optimization,
            self.compute,
            self.parallelism,
            self.data,
            self.evaluation,
            self.reporting,
        )
        faults = [fault for group in groups for fault in group.faults()] + callback_faults(self.callbacks)
        faults += run_faults(self.reporting.run)
        every = self.checkpoint_every
        if every <= timedelta(0) if isinstance(every, timedelta) else _whole("checkpoint_every", every):
            faults.append(
                TrainingFault("checkpoint_every", every, "a number of steps, or a timedelta, above 0")
            )
        if _whole("checkpoint_keep", self.checkpoint_keep) or self.checkpoint_keep > MAX_KEPT:
            allowed = f"a whole number from 1 to {MAX_KEPT}"
            faults.append(TrainingFault("checkpoint_keep", self.checkpoint_keep, allowed))
        if not faults and self.parallelism.exact and self.micro_batches & (self.micro_batches - 1):
            faults.append(TrainingFault("accumulate", self.micro_batches, "a power of two, with exact=True"))
        batch_size, accumulate = self.batching.batch_size, self.compute.accumulate
        if not faults and batch_size != "auto" and (accumulate or 1) > batch_size:
            faults.append(TrainingFault("accumulate", accumulate, "at most the batch size"))
        if faults:
            raise InvalidTraining("fit cannot start like this", faults=[with_fix(each) for each in faults])


EXAMPLES = {
    "accumulate": "accumulate=2",
    "batch_size": "batch_size=32",
    "better": 'better="higher"',
    "checkpoint_every": "checkpoint_every=timedelta(minutes=5)",
    "checkpoint_keep": "checkpoint_keep=3",
    "clip": "clip=1.0",
    "compile": "compile=True",
    "device": 'device="auto"',
    "drop_last": "drop_last=True",
    "epochs": "epochs=10",
    "evaluate_every": "evaluate_every=100",
    "exact": 'exact=True, parallel="ddp"',
    "lr": "lr=1e-3",
    "memory": "memory=16 * 2**30",
    "parallel": 'parallel={"fsdp": 2, "tensor": 2}',
    "patience": "patience=3",
    "pipeline_cuts": 'pipeline_cuts=["4", "8"]',
    "precision": 'precision="bf16"',
    "prefetch": "prefetch=2",
    "seed": "seed=0",
    "steps": "steps=1000",
    "tensor_plan": 'tensor_plan={"blocks.*.up": "column", "blocks.*.down": "row"}',
    "tune": 'tune="auto"',
    "tune_seconds": "tune_seconds=60",
    "warmup": "warmup=100",
    "workers": "workers=2",
}


def with_fix(fault: TrainingFault) -> TrainingFault:
    """`fault`, and how its option can be given."""
    return fault if fault.fix else replace(fault, fix=EXAMPLES.get(fault.where))


def device_faults(name: object) -> list[TrainingFault]:
    """What is wrong with the name of a device, whether or not it is there."""
    try:
        if isinstance(name, str) and (name == "auto" or torch.device(name)):
            return []
    except RuntimeError:
        pass
    return [TrainingFault("device", name, "auto, cpu, cuda, or a device of this machine")]


def parallel_faults(parallel: object) -> list[TrainingFault]:
    """What is wrong with the words, however many processes there are."""
    if isinstance(parallel, str) and parallel in ("auto", *AXES):
        return []
    if isinstance(parallel, Mapping) and parallel and all(_is_word(name, AXES) for name in parallel):
        return [fault for name, count in parallel.items() for fault in _whole(f"parallel[{name!r}]", count)]
    return [TrainingFault("parallel", parallel, f"auto, {', '.join(AXES)}, or their counts")]


def find_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the GPU if there is one. CUDA is not started: a search may want to fork."""
    if name == "auto" and not is_cuda_available():
        return torch.device("cpu")
    if name in ("auto", "cuda") and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    name = "cuda" if name == "auto" else name
    try:
        device = torch.device(name)
        if device.type != "cuda" or not is_cuda_available():
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        fault = TrainingFault("device", f"{name} ({reason})", "auto, cpu, or a device of this machine")
        raise InvalidTraining("there is no such device here", faults=[with_fix(fault)]) from error
    return device


def _whole(name: str, value: object, *, at_least: int = 1) -> list[TrainingFault]:
    if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
        return []
    return [TrainingFault(name, value, f"a whole number, at least {at_least}")]


def _above_0(name: str, value: object) -> list[TrainingFault]:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return []
    return [TrainingFault(name, value, "a number above 0")]


def _flag(name: str, value: object) -> list[TrainingFault]:
    return [] if isinstance(value, bool) else [TrainingFault(name, value, "True, False")]


def _are_words(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and all(isinstance(each, str) for each in value)
    )


def _are_cuts(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and _is_word(cut, ("column", "row")) for name, cut in value.items()
    )


def _is_word(value: object, words: Sequence[str]) -> bool:
    return isinstance(value, str) and value in words
