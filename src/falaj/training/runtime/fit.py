"""`fit`: train a torch model on seeded batches, with checkpoints that it resumes from exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch import nn

from falaj.training.runtime.agent import Agent, LocalAgent
from falaj.training.runtime.data import Data, open_data
from falaj.training.runtime.evaluation import Better, Evaluate
from falaj.training.runtime.loop import FitResult, prepare, train
from falaj.training.runtime.optimizers import OptimizerChoice, Schedule
from falaj.training.runtime.settings import Computing, Looks, Pace, Settings, Updates
from falaj.training.runtime.steps import Loss, Precision
from falaj.training.runtime.wire import platform_agent

__all__ = ["FitResult", "fit"]


def fit(
    model: nn.Module,
    loss: Loss,
    data: Data,
    *,
    batch_size: int = 32,
    steps: int | None = None,
    epochs: int | None = None,
    optimizer: OptimizerChoice = "adamw",
    lr: float = 1e-3,
    schedule: Schedule = "constant",
    warmup: int = 0,
    clip: float | None = None,
    accumulate: int = 1,
    precision: Precision = "fp32",
    compile: bool = False,  # noqa: A002 - the word that torch uses
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

    `data` is tensors (a tuple is inputs…, target), or a map-style dataset; `loss(model(inputs), target)` is the
    mean over a batch. `run` is a folder, or an agent; by default the platform's, and without one nothing is kept.
    `evaluate` is a function of the model or data, used every `evaluate_every` steps (default: each epoch);
    after `patience` evaluations without a better score, training stops. `accumulate` cuts each batch into that
    many micro-batches. What is random depends on `seed`, the step and the micro-batch only.
    """
    settings = Settings(
        pace=Pace(batch_size=batch_size, steps=steps, epochs=epochs, drop_last=drop_last, seed=seed),
        updates=Updates(optimizer=optimizer, lr=lr, schedule=schedule, warmup=warmup, clip=clip),
        computing=Computing(precision=precision, compile=compile, accumulate=accumulate, device=device),
        looks=Looks(evaluate=evaluate, every=evaluate_every, better=better, patience=patience),
        checkpoint_every=checkpoint_every,
    )
    with open_run(run) as agent:
        return train(prepare(model, loss, open_data(data), settings, agent))


@contextmanager
def open_run(run: str | Path | Agent | None) -> Iterator[Agent | None]:
    """The agent for `run`; closed at the end, unless the caller brought it."""
    if run is not None and not isinstance(run, str | Path):
        yield run
        return
    agent = platform_agent() if run is None else LocalAgent(run)
    try:
        yield agent
    finally:
        if agent is not None:
            agent.close()
