"""`fit`: train a torch model on seeded batches, with checkpoints that it resumes from exactly.

`data` is tensors (a tuple is inputs…, target), or a map-style dataset. `run` is a folder, or an agent; by default the
platform's, and without one nothing is kept. `evaluate` is a function of the model, or data, used every
`evaluate_every` steps (by default after each epoch); after `patience` evaluations without a better score, training
stops. `accumulate` cuts each batch into that many micro-batches. What is random depends on `seed`, the step and the
micro-batch only.

Under torchrun the processes train one model together, on one global batch a step. `parallel` is "ddp" (a copy in
each), "fsdp" (shards), "tensor" (pairs of linear layers are cut; `tensor_plan` names them where they cannot be found),
or several at once: {"fsdp": 2, "tensor": 2}. With `exact` the result is the same to the bit with 1, 2, 4 …
processes, as long as `accumulate` stays the same (8 unless given).

`tune="auto"` looks for the fastest plan that computes what fp32 computes, where the run is long enough to gain by it:
precision, layout, compile, CUDA graph, fused optimizer, threads. What is given here (`precision`, `compile`,
`accumulate`) is not searched; `batch_size="auto"` lets the search choose the global batch too. It takes at most
`tune_seconds` (a minute, or a tenth of the run), is kept for next time, and a resumed run keeps its plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch import nn

from falaj.training.runtime.agent import Agent, LocalAgent
from falaj.training.runtime.data import Data, Source, open_data
from falaj.training.runtime.evaluation import Better, Evaluate
from falaj.training.runtime.loop import FitResult, prepare, train
from falaj.training.runtime.optimizers import OptimizerChoice, Schedule
from falaj.training.runtime.plan.choosing import choose_plan
from falaj.training.runtime.plan.numerics import numerics_of
from falaj.training.runtime.plan.plans import CompileMode, Plan, Precision
from falaj.training.runtime.settings import (
    BatchSize,
    Computing,
    Looks,
    Pace,
    Settings,
    Spreading,
    Tune,
    Updates,
    find_device,
)
from falaj.training.runtime.spread.layout import Parallel
from falaj.training.runtime.spread.tensor_plan import TensorPlan
from falaj.training.runtime.steps import Loss
from falaj.training.runtime.terminating import sigterm_stops
from falaj.training.runtime.wire import platform_agent
from falaj.training.runtime.world import World, join_world

__all__ = ["FitResult", "Plan", "fit"]


def fit(
    model: nn.Module,
    loss: Loss,
    data: Data,
    *,
    batch_size: BatchSize = 32,
    steps: int | None = None,
    epochs: int | None = None,
    optimizer: OptimizerChoice = "adamw",
    lr: float = 1e-3,
    schedule: Schedule = "constant",
    warmup: int = 0,
    clip: float | None = None,
    accumulate: int | None = None,
    precision: Precision | None = None,
    compile: bool | CompileMode | None = None,  # noqa: A002 - the word that torch uses
    tune: Tune = "auto",
    tune_seconds: float | None = None,
    parallel: Parallel = "auto",
    tensor_plan: TensorPlan | None = None,
    exact: bool = False,
    drop_last: bool = False,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    better: Better = "lower",
    patience: int | None = None,
    checkpoint_every: int | timedelta = timedelta(minutes=1),
    seed: int = 0,
    device: str = "auto",
    run: str | Path | Agent | None = None,
) -> FitResult:
    """Train `model` in place, for `steps` steps or `epochs` epochs in all, and go on where `run` left off.

    `loss(model(inputs), target)` is the mean over a batch. The options are explained at the top of this file.
    """
    computing = Computing(precision=precision, compile=compile, accumulate=accumulate, device=device)
    settings = Settings(
        pace=Pace(batch_size=batch_size, steps=steps, epochs=epochs, drop_last=drop_last, seed=seed),
        updates=Updates(optimizer=optimizer, lr=lr, schedule=schedule, warmup=warmup, clip=clip),
        computing=replace(computing, tune=tune, tune_seconds=tune_seconds),
        spreading=Spreading(parallel=parallel, tensor_plan=tensor_plan, exact=exact),
        looks=Looks(evaluate=evaluate, every=evaluate_every, better=better, patience=patience),
        checkpoint_every=checkpoint_every,
    )
    return train_as(settings, model, loss, open_data(data), run)


def train_as(
    settings: Settings, model: nn.Module, loss: Loss, source: Source, run: str | Path | Agent | None
) -> FitResult:
    """Train with the other processes of the world, if there are any, until the end or a SIGTERM."""
    world = join_world(find_device(settings.computing.device))
    with open_run(run, world) as agent:
        plan = choose_plan(model, loss, source, settings, agent, world)
        with numerics_of(plan):
            training = prepare(model, loss, source, settings, plan, agent, world)
            if agent is None and world.size == 1:  # nothing is kept, so there is nothing to save
                return train(training)
            with sigterm_stops(lambda: world.wishes.add("stop")):
                return train(training)


@contextmanager
def open_run(run: str | Path | Agent | None, world: World) -> Iterator[Agent | None]:
    """The agent for `run`, of the process that leads; closed at the end, unless the caller brought it."""
    if not world.leads:
        yield None
        return
    if run is not None and not isinstance(run, str | Path):
        yield run
        return
    agent = platform_agent() if run is None else LocalAgent(run)
    try:
        yield agent
    finally:
        if agent is not None:
            agent.close()
