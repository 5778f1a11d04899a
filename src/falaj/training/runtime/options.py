"""What `fit` can be told, option by option: its type, its meaning, and what it is unless it is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, cast

from falaj.training.runtime.agent.agents import Agent
from falaj.training.runtime.callbacks import Callback
from falaj.training.runtime.data.sources import Data, is_table, open_data
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.evaluation import Better, Evaluate
from falaj.training.runtime.parallel.layout import Parallel
from falaj.training.runtime.parallel.tensor_plan import TensorPlan
from falaj.training.runtime.planning.plan import CompileMode, Precision
from falaj.training.runtime.step.optimizers import OptimizerChoice, Schedule

P = ParamSpec("P")
T = TypeVar("T")


class FitKeywords(TypedDict, total=False):
    """One of `steps` and `epochs` must be given; everything else has a default."""

    steps: int | None
    epochs: int | None
    batch_size: BatchSize
    """Samples of a step, over all processes; "auto" leaves it to the search."""
    drop_last: bool
    """Leave out the last batch of an epoch where it is smaller."""
    seed: int
    """What is random depends on it, the step and the micro-batch only."""

    target: str | Sequence[str] | None
    """The columns of a table to be predicted; the others, or `inputs`, are the model's input."""
    inputs: Sequence[str] | None
    workers: int | Literal["auto"]
    """Processes that read a dataset, which changes nothing but the speed."""
    prefetch: int | Literal["auto"]
    """How many steps ahead each of them reads."""

    optimizer: OptimizerChoice
    """A name, or a function from parameters to an optimizer."""
    lr: float
    schedule: Schedule
    warmup: int
    clip: float | None
    """The largest norm of a gradient."""

    accumulate: int | None
    """The micro-batches that each batch is cut into."""
    precision: Precision | None
    compile: bool | CompileMode | None
    tune: Tune
    """"auto" looks for the fastest plan that computes what fp32 computes, where the run is long enough to gain by it:
    precision, layout, compile, CUDA graph, fused optimizer, threads, workers. What is given here is not searched.
    The plan is kept for next time, and a resumed run keeps its own."""
    tune_seconds: float | None
    """How long it may look; unless given, a minute, or a tenth of the run."""
    device: str

    parallel: Parallel
    """Under torchrun the processes train one model together: "ddp" (a copy in each), "fsdp" (shards), "tensor" (pairs
    of linear layers are cut), "pipeline" (layers in stages), or several: {"fsdp": 2, "tensor": 2}. "auto" is the first
    of these that fits in `memory`."""
    tensor_plan: TensorPlan | None
    """Which layers are cut, where pairs cannot be found."""
    pipeline_cuts: Sequence[str] | None
    """The first layer of each later stage, where even stages will not do."""
    memory: int | None
    """The bytes that a process may use, where that is not all that its device has."""
    exact: bool
    """The result is the same to the bit with 1, 2, 4 … processes, as long as `accumulate` stays the same (8 unless
    given), and certificate.json tells what the run has survived."""

    evaluate: Evaluate | None
    """A function of the model, or data whose mean loss is the score. Each module has its own mode again afterwards."""
    evaluate_every: int | None
    """Steps; by default after each epoch."""
    better: Better
    patience: int | None
    """Training stops after so many evaluations without a better score."""

    checkpoint_every: int | timedelta
    checkpoint_keep: int
    """How many of the newest checkpoints stay, beside that of the best evaluation."""
    run: str | Path | Agent | None
    """The folder or agent that keeps the run; by default the platform's, and without one nothing is kept."""
    callbacks: Sequence[Callback]
    """Functions of (step, loss), or objects with on_start, on_step, on_evaluation, on_checkpoint or on_end, which may
    return STOP: the run is over then, unless a later call asks for more steps. callbacks.py says when each is called.
    """
    profile: ProfileChoice
    """True, or so many steps: says where the time of a step goes and what to change, and leaves a trace in the folder
    of the run, or the job's outputs. "nvtx" marks the steps for Nsight Systems."""
    tensorboard: str | Path | bool
    """A folder for event files, or True: beside the trace."""


DEFAULTS: FitKeywords = {
    "steps": None,
    "epochs": None,
    "batch_size": 32,
    "drop_last": False,
    "seed": 0,
    "target": None,
    "inputs": None,
    "workers": "auto",
    "prefetch": "auto",
    "optimizer": "adamw",
    "lr": 1e-3,
    "schedule": "constant",
    "warmup": 0,
    "clip": None,
    "accumulate": None,
    "precision": None,
    "compile": None,
    "tune": "auto",
    "tune_seconds": None,
    "device": "auto",
    "parallel": "auto",
    "tensor_plan": None,
    "pipeline_cuts": None,
    "memory": None,
    "exact": False,
    "evaluate": None,
    "evaluate_every": None,
    "better": "lower",
    "patience": None,
    "checkpoint_every": timedelta(minutes=1),
    "checkpoint_keep": 3,
    "run": None,
    "callbacks": (),
    "profile": False,
    "tensorboard": False,
}


def completed(given: FitKeywords) -> FitKeywords:
    """`given`, and the defaults of what is not; options that there are not are refused."""
    unknown = [name for name in given if name not in DEFAULTS]
    if unknown:
        raise InvalidTraining("fit has no such option", faults=[_unknown(name) for name in unknown])
    return cast(FitKeywords, {**DEFAULTS, **given})


def settings_from(options: FitKeywords) -> FitOptions:
    """All of `options`, which are complete, in groups by the part that reads them; refused where one is wrong."""
    o: Any = options
    evaluate = o["evaluate"]
    if is_table(evaluate):  # it has the columns that are trained on
        evaluate = open_data(cast(Data, evaluate), where="evaluate", inputs=o["inputs"], target=o["target"])
    return FitOptions(
        batching=BatchOptions(**_some(o, "batch_size", "steps", "epochs", "drop_last", "seed")),
        optimization=OptimizerOptions(**_some(o, "optimizer", "lr", "schedule", "warmup", "clip")),
        compute=ComputeOptions(
            **_some(o, "precision", "compile", "accumulate", "device", "tune", "tune_seconds")
        ),
        parallelism=ParallelOptions(
            **_some(o, "parallel", "tensor_plan", "pipeline_cuts", "exact", "memory")
        ),
        data=DataOptions(**_some(o, "workers", "prefetch")),
        evaluation=EvaluationOptions(
            evaluate=evaluate, evaluate_every=o["evaluate_every"], **_some(o, "better", "patience")
        ),
        reporting=ReportingOptions(**_some(o, "profile", "tensorboard", "run")),
        **_some(o, "checkpoint_every", "checkpoint_keep", "callbacks"),
    )


def shown(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, whose signature names every option with its default, for help() and who asks Python."""
    signature, known = inspect.signature(function), cast(dict[str, Any], DEFAULTS)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=known[name], annotation=kind.__forward_arg__
        )
        for name, kind in FitKeywords.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


def _some(options: Any, *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names}


def _unknown(name: str) -> TrainingFault:
    near = get_close_matches(name, DEFAULTS, n=1)
    fix = f"{near[0]}, if that is meant" if near else None
    return TrainingFault(name, "no option of fit", ", ".join(sorted(DEFAULTS)), fix)
