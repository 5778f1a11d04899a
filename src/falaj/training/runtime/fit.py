"""`fit`: train a torch model on seeded batches, with checkpoints from which it resumes exactly.

    fj.fit(model, torch.nn.functional.mse_loss, (inputs, targets), epochs=10)

options.py documents every option.
"""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypedDict, TypeVar, Unpack

from torch import nn

from falaj.training.runtime.agent.agents import Agent, FolderAgent, checkpoint_folder
from falaj.training.runtime.agent.protocol import platform_agent
from falaj.training.runtime.callbacks import Callback
from falaj.training.runtime.checkpointing.storage.folder import CheckpointFolder
from falaj.training.runtime.checkpointing.storage.store import CheckpointStore
from falaj.training.runtime.data.dataloading.start_method import require_not_in_worker
from falaj.training.runtime.data.sources import Data, SampleSource, open_data
from falaj.training.runtime.data.torch_loaders import loader_options
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.evaluation import Better, Evaluate
from falaj.training.runtime.loop import FitResult, prepare, train
from falaj.training.runtime.memory.dry_run import is_dry_run, write_estimate
from falaj.training.runtime.options import (
    OPTIONS,
    BatchSize,
    FitOptions,
    ProfileChoice,
    Tune,
    WorkerCount,
    option_text,
)
from falaj.training.runtime.parallel.agreement import require_same_arguments
from falaj.training.runtime.parallel.auto import resolve_layout
from falaj.training.runtime.parallel.layout import Parallel
from falaj.training.runtime.parallel.process_group import ProcessGroup, find_device, join_process_group
from falaj.training.runtime.parallel.tensor_plan import TensorPlan
from falaj.training.runtime.planning.numerics import apply_numerics
from falaj.training.runtime.planning.plan import CompileMode, Plan, Precision
from falaj.training.runtime.planning.selection import select_plan
from falaj.training.runtime.step.allocator import retained_heap
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.model_checks import require_trainable
from falaj.training.runtime.step.optimizers import OptimizerChoice, Schedule

if TYPE_CHECKING:
    from falaj.training.runtime.checkpointing.checkpointer import Checkpointer

__all__ = ["FitResult", "Plan", "fit"]

Run: TypeAlias = str | Path | Agent | None

P = ParamSpec("P")
T = TypeVar("T")


class FitKeywords(TypedDict, total=False):
    """The keywords of `fit` for type checkers and editors; a test compares them with the dataclasses."""

    steps: int | None
    epochs: int | None
    batch_size: BatchSize
    drop_last: bool
    shuffle: bool
    seed: int
    target: str | Sequence[str] | None
    inputs: Sequence[str] | None
    workers: WorkerCount
    prefetch: WorkerCount
    optimizer: OptimizerChoice
    lr: float
    schedule: Schedule
    warmup: int
    clip: float | None
    accumulate: int | None
    precision: Precision | None
    compile: bool | CompileMode | None
    tune: Tune
    tune_seconds: float | None
    device: str
    parallel: Parallel
    tensor_plan: TensorPlan | None
    pipeline_cuts: Sequence[str] | None
    memory: int | None
    exact: bool
    evaluate: Evaluate | None
    evaluate_every: int | None
    better: Better
    patience: int | None
    checkpoint_every: int | timedelta
    checkpoint_keep: int
    run: str | Path | Agent | None
    callbacks: Sequence[Callback]
    profile: ProfileChoice
    tensorboard: str | Path | bool
    progress: bool


def with_option_signature(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` with a signature and a docstring that have every option, for help() and inspect."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=str(each.type)
        )
        for name, each in OPTIONS.items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions\n\n{option_text()}"
    return function


@with_option_signature
def fit(model: nn.Module, loss: Loss, data: Data, **options: Unpack[FitKeywords]) -> FitResult:
    """Train `model` in place for `steps` steps or `epochs` epochs in total, and resume the run in `run`.

    `loss` is the mean over a batch: loss(output, target), or loss(output), a function of the whole output. None: the
    model computes it, as those of Hugging Face do; its output has a `loss`.

    `data` is tensors or NumPy arrays (a tuple is inputs…, target); a data frame of pandas or polars, a pyarrow table,
    or a path of Parquet or Arrow files, with `target` for its column; a map-style dataset; or a DataLoader, which
    states batch_size, shuffle, drop_last, workers and collate_fn.

    A batch that is a tuple is model(inputs…) and the target of the loss. A dict is passed as keywords, if `forward` has
    parameters of these names; `target` names the value that is the target of the loss.
    """
    given: FitKeywords = {**loader_options(data), **options}  # type: ignore[typeddict-item]
    chosen = FitOptions.from_keywords(**given)
    require_trainable(model, loss)
    source = open_data(data, inputs=chosen.data.inputs, target=chosen.data.target)
    if is_dry_run():
        write_estimate(chosen, model, loss, source)
    return run_training(chosen, model, loss, source)


def run_training(options: FitOptions, model: nn.Module, loss: Loss, source: SampleSource) -> FitResult:
    """Train together with the other processes of the group, if any, until the end or a SIGTERM."""
    require_not_in_worker()
    run = options.reporting.run
    world = join_process_group(find_device(options.compute.device))
    require_same_arguments(model, source, options, world)
    with retained_heap(), open_run(run, world) as agent:
        plan = select_plan(model, loss, source, options, agent, world)
        notify = agent.notify if agent else print
        options, plan = resolve_layout(model, loss, source, options, plan, world, notify)
        with apply_numerics(plan), open_checkpointer(run, agent, world) as checkpointer:
            training = prepare(model, loss, source, options, plan, agent, world, checkpointer)
            saves = agent is not None or world.size > 1  # without either there is nothing to save
            stops = sigterm_stops(lambda: world.requests.add("stop")) if saves else nullcontext()
            with stops, closing(training.engine), closing(training.report):
                return train(training)


@contextmanager
def open_run(run: Run, world: ProcessGroup) -> Iterator[Agent | None]:
    """Open the agent of `run` on rank 0, and close it at the end unless the caller made it."""
    if not world.is_leader:
        yield None
        return
    if run is not None and not isinstance(run, str | Path):
        yield run
        return
    agent = platform_agent() if run is None else FolderAgent(run)
    try:
        yield agent
    finally:
        if agent is not None:
            agent.close()


@contextmanager
def open_checkpointer(run: Run, agent: Agent | None, world: ProcessGroup) -> Iterator[Checkpointer | None]:
    """Open the checkpointer of `run` on every rank, and wait for it at the end. None if the run is not stored."""
    if not world.broadcast_flag(agent is not None):
        yield None
        return
    from falaj.training.runtime.checkpointing.checkpointer import Checkpointer  # not needed by trial runs

    store = agent.checkpoints() if agent is not None else _open_follower_store(run)
    if world.any(store is None) or store is None:
        fault = TrainingFault("run", run, "the same in all processes, or a folder that all of them see")
        raise InvalidTraining("a process has no store for its part of a checkpoint", faults=[fault])
    checkpointer = Checkpointer(store, world)
    try:
        yield checkpointer
    finally:
        checkpointer.close()


def _open_follower_store(run: Run) -> CheckpointStore | None:
    if isinstance(run, str | Path):
        return CheckpointFolder(checkpoint_folder(run))
    if run is not None:
        return run.checkpoints()
    agent = platform_agent()
    if agent is None:
        return None
    with closing(agent):  # the checkpoints use a connection of their own
        return agent.checkpoints()


@contextmanager
def sigterm_stops(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM, and raise the signal again at the end: the step is finished and the run saved first.

    A handler that the user has set is left alone, and so are threads other than the main one, which cannot have one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    was_signalled = False

    def handle(*_: object) -> None:
        nonlocal was_signalled
        was_signalled = True
        stop()

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if was_signalled:
            signal.raise_signal(signal.SIGTERM)
