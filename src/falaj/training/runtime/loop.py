"""The training loop, top to bottom: set up, resume, step after step, and the account at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import nn

from falaj.training.runtime.agent import Agent
from falaj.training.runtime.batches import BatchPlan
from falaj.training.runtime.checkpoints import Facts, Position
from falaj.training.runtime.data import Source
from falaj.training.runtime.engine import Engine, make_engine
from falaj.training.runtime.evaluation import Best, Evaluation, scorer
from falaj.training.runtime.heartbeat import own_heartbeat
from falaj.training.runtime.ledger import Ledger
from falaj.training.runtime.plan.plans import Plan
from falaj.training.runtime.report import Report
from falaj.training.runtime.saving import Saver
from falaj.training.runtime.settings import BATCH_SIZE_TO_START_FROM, Pace, Settings
from falaj.training.runtime.spread.layout import lay_out
from falaj.training.runtime.steps import Loss, Step
from falaj.training.runtime.world import World

Stopped = Literal["done", "patience", "asked"]


@dataclass(frozen=True)
class FitResult:
    """What came of a call of `fit`. Losses, speed and goodput are of this call, not of those it resumed."""

    step: int
    """The last step that was done, counted from the beginning of the run."""
    resumed_from: int
    """The step of the checkpoint that this call went on from; 0 if it began anew."""
    losses: list[float]
    """The loss of each step of this call; the first is of step `resumed_from + 1`."""
    best: Best | None
    stopped: Stopped
    samples_per_second: float
    goodput: float
    """Time in training steps / all the time: what evaluations, checkpoints and resuming left over."""
    seconds: float
    ledger: str
    """The head of the hash chain over the samples of all the steps; see `expected_head`."""
    plan: Plan
    """How the steps were computed."""


@dataclass
class Training:
    """A run that is ready to go on after step `number`."""

    pace: Pace
    total: int
    plan: BatchPlan
    world: World
    engine: Engine
    evaluation: Evaluation | None
    saver: Saver
    report: Report
    ledger: Ledger
    clock: Clock
    chosen: Plan
    number: int
    resumed_from: int


def train(training: Training) -> FitResult:
    """Run the steps that are still missing, and save at the end."""
    t, heart = training, own_heartbeat()
    while (stopped := reason_to_stop(t)) is None:
        heart.beat()
        t.number += 1
        indices = t.plan.indices(t.number)
        t.engine.advance(t.number, indices, t.report.add)
        t.ledger.add(t.number, indices)
        if t.evaluation and t.number % t.evaluation.every == 0:
            evaluate(t, t.evaluation)
        if t.saver.due(t.number):
            save(t)
    heart.rest()
    save(t)
    return account(t, stopped)


def prepare(
    model: nn.Module,
    loss: Loss,
    source: Source,
    settings: Settings,
    chosen: Plan,
    agent: Agent | None,
    world: World,
) -> Training:
    """Put the parts of a run together, and the newest checkpoint, if there is one, into them."""
    clock = Clock()
    pace, say = settings.pace, agent.say if agent else print
    batch_size = (
        chosen.batch_size or BATCH_SIZE_TO_START_FROM if pace.batch_size == "auto" else pace.batch_size
    )
    plan = BatchPlan(len(source), batch_size, pace.seed, pace.drop_last)
    total = steps_of(pace, plan)
    engine = make_engine(
        model, loss, source, settings, chosen, batch_size=batch_size, total=total, world=world, say=say
    )
    step = engine.step
    saver = Saver(
        agent, step, facts(settings, chosen, plan, world), every=settings.checkpoint_every, world=world
    )
    evaluation = make_evaluation(settings, step, plan, device=world.device)
    with clock.aside():
        done = saver.resume()
        if done is None:
            done = Position()
            saver.save(done)  # so that also a run that is killed before its next one starts from this model
    if evaluation and done.best_step is not None and done.best_score is not None:
        evaluation.best, evaluation.stale = Best(done.best_step, done.best_score), done.stale
    engine.get_ready(chosen)
    report = Report(agent, plan, saver, world, done=done.step, total=total)
    ledger = Ledger(done.ledger)
    return Training(
        *(pace, total, plan, world, engine, evaluation, saver, report, ledger, clock, chosen),
        number=done.step,
        resumed_from=done.step,
    )


def steps_of(pace: Pace, plan: BatchPlan) -> int:
    """How many steps the whole run has."""
    return pace.steps or (pace.epochs or 0) * plan.steps_per_epoch


def make_evaluation(
    settings: Settings, step: Step, plan: BatchPlan, *, device: torch.device
) -> Evaluation | None:
    looks = settings.looks
    if looks.evaluate is None:
        return None
    score = scorer(looks.evaluate, step, device=device, batch_size=plan.batch_size)
    return Evaluation(score, looks.every or plan.steps_per_epoch, looks.better, looks.patience)


def facts(settings: Settings, chosen: Plan, plan: BatchPlan, world: World) -> Facts:
    """What must be the same for a resumed run to be bitwise the same."""
    spreading = settings.spreading
    return {
        **asdict(plan),
        "accumulate": chosen.micro_batches,
        "precision": chosen.precision,
        "compile": chosen.compile,
        "layout": chosen.layout,
        "fused": chosen.fused,
        "graph": chosen.graph,
        "chosen_threads": chosen.threads or 0,
        "device": world.device.type,
        "exact": spreading.exact,
        **({} if spreading.exact else {"processes": lay_out(spreading.parallel, world.size).words}),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def reason_to_stop(t: Training) -> Stopped | None:
    if t.number >= t.total:
        return "done"
    if t.world.does("stop"):
        return "asked"
    if t.evaluation and t.evaluation.out_of_patience:
        return "patience"
    return None


def evaluate(t: Training, evaluation: Evaluation) -> None:
    t.report.settle()
    with t.clock.aside():
        t.report.log(t.number, "evaluation", evaluation.judge(t.number))


def save(t: Training) -> None:
    """Save the run as it stands. The metrics go first: no checkpoint is ahead of them."""
    t.report.settle()
    with t.clock.aside():
        t.report.tell()
        best = t.evaluation.best if t.evaluation else None
        t.saver.save(
            Position(
                step=t.number,
                ledger=t.ledger.head,
                best_step=best.step if best else None,
                best_score=best.score if best else None,
                stale=t.evaluation.stale if t.evaluation else 0,
            )
        )


def account(t: Training, stopped: Stopped) -> FitResult:
    seconds, useful = t.clock.read()
    first = t.resumed_from
    samples = t.plan.samples_until(t.number) - t.plan.samples_until(first)
    return FitResult(
        step=t.number,
        resumed_from=first,
        losses=t.report.losses,
        best=t.evaluation.best if t.evaluation else None,
        stopped=stopped,
        samples_per_second=samples / useful,
        goodput=useful / seconds,
        seconds=seconds,
        ledger=t.ledger.head,
        plan=t.chosen,
    )


class Clock:
    """Tells the time that went into training steps from all the time."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._aside = 0.0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens here is not a training step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._aside += time.perf_counter() - start

    def read(self) -> tuple[float, float]:
        """Seconds in all, and seconds in training steps."""
        seconds = time.perf_counter() - self._start
        return seconds, seconds - self._aside
