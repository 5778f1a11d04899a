"""The options of `fit`: one tree of frozen dataclasses with the type, default and documentation of each option.

The keywords of `fit`, their validation, the parameters recorded with a run, the check that all processes were given the
same arguments, and the reference page are derived from it.
"""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

import torch

from falaj.training.runtime.agent.agents import Agent, run_faults
from falaj.training.runtime.agent.job import job
from falaj.training.runtime.callbacks import Callback, callback_faults
from falaj.training.runtime.checkpointing.storage.store import MAX_KEPT
from falaj.training.runtime.data.sources import Data, is_named_data, is_table, open_data
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.evaluation import Better, Evaluate, evaluate_faults
from falaj.training.runtime.option_checks import (
    are_names,
    device_faults,
    flag_faults,
    is_one_of,
    is_tensor_plan,
    parallel_faults,
    positive_faults,
    whole_number_faults,
)
from falaj.training.runtime.parallel.layout import Parallel, parallel_layout
from falaj.training.runtime.parallel.tensor_plan import TensorPlan
from falaj.training.runtime.planning.plan import COMPILE_MODES, PRECISIONS, CompileMode, Plan, Precision
from falaj.training.runtime.step.optimizers import (
    OptimizerChoice,
    Schedule,
    optimizer_faults,
    schedule_faults,
)

EXACT_MICRO_BATCHES = 8
INITIAL_BATCH_SIZE = 32
"""The batch size of a run with `batch_size="auto"` that is not searched, and the first one that a search tries."""
PROFILED_STEPS = 20
TEXT_WIDTH = 110
NVTX_VARIABLE = "FALAJ_NVTX"
"""Set in the environment by the launcher when it runs a rank under Nsight Systems."""

BatchSize: TypeAlias = int | Literal["auto"]
WorkerCount: TypeAlias = int | Literal["auto"]
Tune: TypeAlias = Literal["auto", "off"] | Plan
"""auto: search where the run is long enough to gain by it; off: compute as the options say; or the plan to use."""
ProfileChoice: TypeAlias = bool | int | Literal["nvtx"]
"""True: 20 steps; a number: that many steps; nvtx: NVTX ranges for Nsight Systems around every step."""


def about(
    doc: str, *, example: str | None = None, recorded: bool = False, agreed: bool = False
) -> dict[str, Any]:
    """Return the metadata of an option's field.

    `recorded` options become parameters of the run. `agreed` options must be equal in all processes. `example` is
    the fix that an error suggests where it has no other.
    """
    return {"doc": doc, "example": example, "recorded": recorded, "agreed": agreed}


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The length of the training, and its batches."""

    steps: int | None = field(
        default=None,
        metadata=about(
            "Number of training steps; exactly one of `steps` and `epochs` must be given.",
            example="steps=1000",
            recorded=True,
            agreed=True,
        ),
    )
    epochs: int | None = field(
        default=None,
        metadata=about("Number of passes over the data.", example="epochs=10", recorded=True, agreed=True),
    )
    batch_size: BatchSize = field(
        default=32,
        metadata=about(
            'Samples per step over all processes; "auto" includes it in the plan search.',
            example="batch_size=32",
            agreed=True,
        ),
    )
    drop_last: bool = field(
        default=False,
        metadata=about(
            "Drop the last batch of an epoch if it is smaller.",
            example="drop_last=True",
            recorded=True,
            agreed=True,
        ),
    )
    shuffle: bool = field(
        default=True,
        metadata=about(
            "Shuffle the samples in each epoch, by the seed; False keeps the order of the data.",
            example="shuffle=False",
            recorded=True,
            agreed=True,
        ),
    )
    seed: int = field(
        default=0,
        metadata=about(
            "Seed of all random numbers; they depend on the seed, the step and the micro-batch only.",
            example="seed=0",
            recorded=True,
            agreed=True,
        ),
    )

    def faults(self) -> list[TrainingFault]:
        faults = [] if self.batch_size == "auto" else whole_number_faults("batch_size", self.batch_size)
        if (self.steps is None) == (self.epochs is None):
            given = f"steps={self.steps}, epochs={self.epochs}"
            faults.append(TrainingFault("steps", given, "one of steps and epochs", "epochs=10"))
        for name, value in (("steps", self.steps), ("epochs", self.epochs)):
            faults += [] if value is None else whole_number_faults(name, value)
        if whole_number_faults("seed", self.seed, at_least=0) or self.seed >= 1 << 63:
            faults.append(TrainingFault("seed", self.seed, "a whole number from 0 to 2**63 - 1"))
        return faults + flag_faults("drop_last", self.drop_last) + flag_faults("shuffle", self.shuffle)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The columns of a table, and the reading of a dataset. What is "auto" is measured."""

    target: str | Sequence[str] | None = field(
        default=None,
        metadata=about(
            "Columns of a table, or values of a dict, to predict; the others, or `inputs`, are the model's input."
        ),
    )
    inputs: Sequence[str] | None = field(
        default=None, metadata=about("Columns of a table, or values of a dict, that are the model's input.")
    )
    workers: WorkerCount = field(
        default="auto",
        metadata=about(
            "Worker processes that read a dataset; it affects the speed only.", example="workers=2"
        ),
    )
    prefetch: WorkerCount = field(
        default="auto", metadata=about("Number of steps that each worker reads ahead.", example="prefetch=2")
    )

    def faults(self) -> list[TrainingFault]:
        faults = [] if self.workers == "auto" else whole_number_faults("workers", self.workers, at_least=0)
        return faults + ([] if self.prefetch == "auto" else whole_number_faults("prefetch", self.prefetch))

    @property
    def fixed(self) -> dict[str, str | int]:
        """The values that the caller has decided, by their names in a plan."""
        given = {"workers": self.workers, "prefetch": self.prefetch}
        return {name: value for name, value in given.items() if value != "auto"}


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The update of the parameters."""

    optimizer: OptimizerChoice = field(
        default="adamw",
        metadata=about(
            "Name of an optimizer, an optimizer, or a function from parameters to an optimizer.",
            recorded=True,
            agreed=True,
        ),
    )
    lr: float = field(
        default=1e-3,
        metadata=about(
            "Learning rate of an optimizer given by name.", example="lr=1e-3", recorded=True, agreed=True
        ),
    )
    schedule: Schedule = field(
        default="constant",
        metadata=about(
            "Learning-rate schedule: a name, or a function from the step to a factor.",
            recorded=True,
            agreed=True,
        ),
    )
    warmup: int = field(
        default=0,
        metadata=about(
            "Number of steps over which the learning rate rises linearly.",
            example="warmup=100",
            recorded=True,
            agreed=True,
        ),
    )
    clip: float | None = field(
        default=None,
        metadata=about("Maximum norm of the gradient.", example="clip=1.0", recorded=True, agreed=True),
    )

    def faults(self) -> list[TrainingFault]:
        faults = optimizer_faults(self.optimizer) + schedule_faults(self.schedule)
        faults += whole_number_faults("warmup", self.warmup, at_least=0) + positive_faults("lr", self.lr)
        return faults + ([] if self.clip is None else positive_faults("clip", self.clip))


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """The computation of gradients. What is None is left to the plan search; without a search it is the plain way."""

    accumulate: int | None = field(
        default=None,
        metadata=about(
            "Gradient accumulation: number of micro-batches that each batch is split into.",
            example="accumulate=2",
            recorded=True,
            agreed=True,
        ),
    )
    precision: Precision | None = field(
        default=None,
        metadata=about(
            "Precision of the computation, such as bf16.", example='precision="bf16"', agreed=True
        ),
    )
    compile: bool | CompileMode | None = field(
        default=None,
        metadata=about(
            "Whether, or in which mode, torch.compile is used.", example="compile=True", agreed=True
        ),
    )
    tune: Tune = field(
        default="auto",
        metadata=about(
            "Plan search: auto looks for the fastest plan with fp32 results (precision, memory layout, compile, CUDA "
            "graph, fused optimizer, threads, workers) where the run is long enough; off does not; or a Plan to use.",
            example='tune="auto"',
        ),
    )
    tune_seconds: float | None = field(
        default=None,
        metadata=about(
            "Time limit of the plan search; by default a minute, or a tenth of the run.",
            example="tune_seconds=60",
        ),
    )
    device: str = field(
        default="auto",
        metadata=about('Device to train on; "auto" is the GPU if there is one.', example='device="auto"'),
    )

    def faults(self) -> list[TrainingFault]:
        faults = [] if self.accumulate is None else whole_number_faults("accumulate", self.accumulate)
        if self.precision is not None and not is_one_of(self.precision, PRECISIONS):
            faults.append(TrainingFault("precision", self.precision, ", ".join(PRECISIONS)))
        if not isinstance(self.compile, bool | None) and not is_one_of(self.compile, COMPILE_MODES):
            faults.append(TrainingFault("compile", self.compile, f"True, False, {', '.join(COMPILE_MODES)}"))
        if not isinstance(self.tune, Plan) and not is_one_of(self.tune, ("auto", "off")):
            faults.append(TrainingFault("tune", self.tune, "auto, off, or a Plan"))
        if self.tune_seconds is not None:
            faults += positive_faults("tune_seconds", self.tune_seconds)
        return faults + device_faults(self.device)

    @property
    def fixed(self) -> dict[str, str | int]:
        """The values that the caller has decided, by their names in a plan."""
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
    """The distribution of the model over processes."""

    parallel: Parallel = field(
        default="auto",
        metadata=about(
            "How the processes of torchrun train one model: ddp (replicas), fsdp (sharded), tensor (pairs of linear "
            "layers are split), pipeline (stages of layers), or several, as {'fsdp': 2, 'tensor': 2}; auto is the "
            "first of these that fits in `memory`.",
            example='parallel={"fsdp": 2, "tensor": 2}',
            agreed=True,
        ),
    )
    tensor_plan: TensorPlan | None = field(
        default=None,
        metadata=about(
            "Layers that tensor parallelism splits, where pairs cannot be found automatically.",
            example='tensor_plan={"blocks.*.up": "column", "blocks.*.down": "row"}',
            agreed=True,
        ),
    )
    pipeline_cuts: Sequence[str] | None = field(
        default=None,
        metadata=about(
            "First layer of each pipeline stage after the first, instead of even stages.",
            example='pipeline_cuts=["4", "8"]',
            agreed=True,
        ),
    )
    memory: int | None = field(
        default=None,
        metadata=about(
            "Memory limit of a process in bytes, if it is less than all of its device.",
            example="memory=16 * 2**30",
        ),
    )
    exact: bool = field(
        default=False,
        metadata=about(
            "Make the result bitwise equal with 1, 2, 4 … processes as long as `accumulate` (8 by default) stays the "
            "same, and write certificate.json.",
            example='exact=True, parallel="ddp"',
            recorded=True,
            agreed=True,
        ),
    )

    def faults(self) -> list[TrainingFault]:
        faults = parallel_faults(self.parallel) + flag_faults("exact", self.exact)
        cuts = self.pipeline_cuts
        if cuts is not None and not are_names(cuts):
            faults.append(TrainingFault("pipeline_cuts", cuts, "a list of names of layers"))
        if self.tensor_plan is not None and not is_tensor_plan(self.tensor_plan):
            allowed = "names of linear layers, each column or row"
            faults.append(TrainingFault("tensor_plan", self.tensor_plan, allowed))
        faults += [] if self.memory is None else whole_number_faults("memory", self.memory)
        if not faults and self.exact and self.parallel not in ("auto", "ddp"):
            return [TrainingFault("exact", f"with parallel={self.parallel}", "parallel=ddp or auto")]
        return faults


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Evaluation and early stopping."""

    evaluate: Evaluate | None = field(
        default=None,
        metadata=about(
            "A function from the model to a score, or data whose mean loss is the score.", agreed=True
        ),
    )
    evaluate_every: int | None = field(
        default=None,
        metadata=about(
            "Number of steps between evaluations; by default one epoch.",
            example="evaluate_every=100",
            recorded=True,
            agreed=True,
        ),
    )
    better: Better = field(
        default="lower",
        metadata=about(
            "Whether a lower or a higher score is better.", example='better="higher"', agreed=True
        ),
    )
    patience: int | None = field(
        default=None,
        metadata=about(
            "Early stopping: number of evaluations without a better score after which the training stops.",
            example="patience=3",
            recorded=True,
            agreed=True,
        ),
    )

    def faults(self) -> list[TrainingFault]:
        faults = evaluate_faults(self.evaluate)
        for name, value in (("evaluate_every", self.evaluate_every), ("patience", self.patience)):
            if value is not None:
                faults += whole_number_faults(name, value)
                if self.evaluate is None:
                    allowed = "only together with evaluate"
                    faults.append(TrainingFault(name, value, allowed, "evaluate=validation_data"))
        if not is_one_of(self.better, ("lower", "higher")):
            faults.append(TrainingFault("better", self.better, "lower, higher"))
        return faults


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When checkpoints are saved, and how many are kept."""

    checkpoint_every: int | timedelta = field(
        default=timedelta(minutes=1),
        metadata=about(
            "Number of steps, or time, between checkpoints.",
            example="checkpoint_every=timedelta(minutes=5)",
            recorded=True,
            agreed=True,
        ),
    )
    checkpoint_keep: int = field(
        default=3,
        metadata=about(
            "Number of newest checkpoints that are kept beside the one with the best score.",
            example="checkpoint_keep=3",
            agreed=True,
        ),
    )

    def faults(self) -> list[TrainingFault]:
        every, faults = self.checkpoint_every, []
        if (
            every <= timedelta(0)
            if isinstance(every, timedelta)
            else whole_number_faults("checkpoint_every", every)
        ):
            allowed = "a number of steps, or a timedelta, above 0"
            faults.append(TrainingFault("checkpoint_every", every, allowed))
        if whole_number_faults("checkpoint_keep", self.checkpoint_keep) or self.checkpoint_keep > MAX_KEPT:
            allowed = f"a whole number from 1 to {MAX_KEPT}"
            faults.append(TrainingFault("checkpoint_keep", self.checkpoint_keep, allowed))
        return faults


@dataclass(frozen=True, kw_only=True)
class ReportingOptions:
    """Where a run is recorded, and what it reports."""

    run: str | Path | Agent | None = field(
        default=None,
        metadata=about(
            "Folder or agent that stores the run; by default the platform's agent, and nothing without a platform."
        ),
    )
    callbacks: Sequence[Callback] = field(
        default=(),
        metadata=about(
            "Functions of (step, loss), or objects with on_start, on_step, on_evaluation, on_checkpoint or on_end."
        ),
    )
    profile: ProfileChoice = field(
        default=False,
        metadata=about(
            "True, or a number of steps: measure where the time of a step goes and write a trace to the run's folder "
            'or the job\'s outputs; "nvtx" marks the steps for Nsight Systems.',
            example="profile=True",
        ),
    )
    tensorboard: str | Path | bool = field(
        default=False,
        metadata=about(
            "Folder for TensorBoard event files, or True for a folder beside the trace.",
            example="tensorboard=True",
        ),
    )

    progress: bool = field(
        default=True,
        metadata=about(
            "Without a platform, show the progress: a bar on a terminal, a line every ten seconds elsewhere.",
            example="progress=False",
        ),
    )

    def faults(self) -> list[TrainingFault]:
        profile, faults = self.profile, callback_faults(self.callbacks) + run_faults(self.run)
        faults += flag_faults("progress", self.progress)
        if profile == "nvtx" and not has_nvtx():
            given = "nvtx, with a torch that was built without CUDA"
            faults.append(TrainingFault("profile", given, "nvtx with CUDA; True anywhere"))
        elif profile != "nvtx" and (not isinstance(profile, int) or profile < 0):
            faults.append(TrainingFault("profile", profile, "True, a number of steps, or nvtx"))
        if not isinstance(self.tensorboard, bool | str | Path):
            faults.append(TrainingFault("tensorboard", self.tensorboard, "True, or a folder"))
        return faults

    @property
    def profiled_steps(self) -> int:
        """The number of steps to profile; 0 for none."""
        if self.profile == "nvtx":
            return 0
        return PROFILED_STEPS if self.profile is True else int(self.profile)

    @property
    def has_nvtx(self) -> bool:
        """Whether the parts of a step are marked for Nsight Systems."""
        asked = os.environ.get(NVTX_VARIABLE, "") not in ("", "0")
        return self.profile == "nvtx" or (asked and has_nvtx())

    @property
    def events_folder(self) -> Path | None:
        """The folder of TensorBoard event files; None if they are not written."""
        if self.tensorboard is False:
            return None
        return self.folder / "tensorboard" if self.tensorboard is True else Path(self.tensorboard)

    @property
    def folder(self) -> Path:
        """The folder for files that the run writes: the folder of the run, or the outputs of the job."""
        return Path(self.run) if isinstance(self.run, str | Path) else job.outputs


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """All options of a run, in groups by the part that reads them. InvalidTraining lists everything that is wrong."""

    batching: BatchOptions = field(default_factory=BatchOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimization: OptimizerOptions = field(default_factory=OptimizerOptions)
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    parallelism: ParallelOptions = field(default_factory=ParallelOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpointing: CheckpointOptions = field(default_factory=CheckpointOptions)
    reporting: ReportingOptions = field(default_factory=ReportingOptions)

    @classmethod
    def from_keywords(cls, **given: Any) -> Self:
        """Return the options for keywords of `fit`. Unknown names are refused; data to evaluate is opened."""
        if unknown := [name for name in given if name not in OPTIONS]:
            faults = [_unknown_option(name) for name in unknown]
            raise InvalidTraining("fit has no such option", faults=faults)
        columns = {name: given.get(name) for name in ("inputs", "target")}
        evaluate, is_named = given.get("evaluate"), any(value is not None for value in columns.values())
        if is_table(evaluate) or (is_named and is_named_data(evaluate)):  # as the training data
            given["evaluate"] = open_data(cast(Data, given["evaluate"]), where="evaluate", **columns)
        groups = {
            name: group(**{each.name: given[each.name] for each in fields(group) if each.name in given})
            for name, group in GROUPS.items()
        }
        return cls(**groups)

    def values(self) -> dict[str, Any]:
        """Every option by its name in `fit`."""
        groups = [getattr(self, name) for name in GROUPS]
        return {each.name: getattr(group, each.name) for group in groups for each in fields(group)}

    @property
    def micro_batches(self) -> int:
        """The minimum number of micro-batches of a global batch; an exact run has the same number on any layout."""
        asked = self.compute.accumulate or 1
        return EXACT_MICRO_BATCHES if self.parallelism.exact and asked == 1 else asked

    def micro_batches_over(self, processes: int) -> int:
        """Return `micro_batches`; for a pipeline without `accumulate`, two per stage to keep all stages busy."""
        layout, batch_size = parallel_layout(self.parallelism.parallel, processes), self.batching.batch_size
        if layout.pipeline == 1 or self.compute.accumulate is not None:
            return self.micro_batches
        least = 2 * layout.pipeline * layout.data
        return least if batch_size == "auto" else min(least, batch_size)

    @property
    def fixed(self) -> dict[str, str | int]:
        """The values of a plan that the caller has decided."""
        return {**self.compute.fixed, **self.data.fixed}

    def __post_init__(self) -> None:
        faults = [fault for name in GROUPS for fault in getattr(self, name).faults()]
        if not faults and self.parallelism.exact and self.micro_batches & (self.micro_batches - 1):
            faults.append(TrainingFault("accumulate", self.micro_batches, "a power of two, with exact=True"))
        batch_size, accumulate = self.batching.batch_size, self.compute.accumulate
        if not faults and batch_size != "auto" and (accumulate or 1) > batch_size:
            faults.append(TrainingFault("accumulate", accumulate, "at most the batch size"))
        if faults:
            raise InvalidTraining(
                "fit cannot start like this", faults=[_with_example(each) for each in faults]
            )


GROUPS: Mapping[str, type[Any]] = {
    each.name: cast(type[Any], each.default_factory) for each in fields(FitOptions)
}
OPTIONS: Mapping[str, Field[Any]] = {each.name: each for group in GROUPS.values() for each in fields(group)}
"""Every option of `fit` by name."""


class OptionRow(NamedTuple):
    """One option of `fit` in the reference documentation."""

    name: str
    type: str
    default: str
    doc: str


def fit_options() -> list[OptionRow]:
    """Return the options of `fit` for the reference page: name, type, default and one sentence."""
    return [
        OptionRow(name, str(each.type), _shown(each.default), str(each.metadata["doc"]))
        for name, each in OPTIONS.items()
    ]


def option_text() -> str:
    """Return all options of `fit` with their defaults for `help`, in their groups."""
    lines = []
    for group in GROUPS.values():
        lines += ["", f"{(inspect.getdoc(group) or '').split('. ')[0].rstrip('.')}:"]
        for each in fields(group):
            text = f"{each.name} = {_shown(each.default)}: {each.metadata['doc']}"
            lines += textwrap.wrap(text, TEXT_WIDTH, initial_indent="    ", subsequent_indent="        ")
    return "\n".join(lines).strip()


def recorded_options(options: FitOptions) -> Iterator[tuple[str, Any]]:
    """Yield the options that become parameters of the run; None, and flags as they are by default, are left out."""
    for name, value in options.values().items():
        is_default_flag = isinstance(value, bool) and value is OPTIONS[name].default
        if OPTIONS[name].metadata["recorded"] and value is not None and not is_default_flag:
            yield name, value


def agreed_options(options: FitOptions) -> dict[str, Any]:
    """Return the options that must be equal in all processes."""
    return {name: value for name, value in options.values().items() if OPTIONS[name].metadata["agreed"]}


def duration_text(duration: timedelta) -> str:
    """Return a duration in seconds, as runs record it."""
    return f"{duration.total_seconds():g} s"


def has_nvtx() -> bool:
    """Return whether torch was built with CUDA, and so with NVTX."""
    return torch.version.cuda is not None


def _with_example(fault: TrainingFault) -> TrainingFault:
    if fault.fix or fault.where not in OPTIONS:
        return fault
    return replace(fault, fix=OPTIONS[fault.where].metadata["example"])


def _unknown_option(name: str) -> TrainingFault:
    near = get_close_matches(name, OPTIONS, n=1)
    fix = f"{near[0]}, if that is meant" if near else None
    return TrainingFault(name, "no option of fit", ", ".join(sorted(OPTIONS)), fix)


def _shown(default: object) -> str:
    if isinstance(default, timedelta):
        return f"timedelta(seconds={default.total_seconds():g})"
    return repr(default)
