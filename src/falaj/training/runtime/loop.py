"""The training loop, top to bottom: set up, resume, step after step, and the account at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from falaj.training.runtime.agent import Agent
from falaj.training.runtime.batches import BatchPlan
from falaj.training.runtime.callbacks import Callbacks
from falaj.training.runtime.certificate import Certificate, home_of, settle_certificate
from falaj.training.runtime.checkpoints import Facts, Position
from falaj.training.runtime.data import Source
from falaj.training.runtime.engine import Engine, make_engine
from falaj.training.runtime.evaluation import Best, Evaluation, scorer
from falaj.training.runtime.heartbeat import own_heartbeat
from falaj.training.runtime.ledger import Ledger
from falaj.training.runtime.metering import Clock
from falaj.training.runtime.plan.plans import Plan
from falaj.training.runtime.profiling.verdicts import Verdict
from falaj.training.runtime.readiness import broken_limit
from falaj.training.runtime.report import Report
from falaj.training.runtime.saving import Saver
from falaj.training.runtime.settings import BATCH_SIZE_TO_START_FROM, Pace, Settings
from falaj.training.runtime.spread.layout import lay_out
from falaj.training.runtime.steps import Loss, Step
from falaj.training.runtime.surviving import Survival
from falaj.training.runtime.telling import Teller
from falaj.training.runtime.world import World

if TYPE_CHECKING:
    from falaj.training.runtime.checkpoint.keeper import Keeper

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
    certificate: Certificate
    """What the run has survived, and whether what it computed again was equal."""
    mfu: float | None = None
    """The part of the hardware's peak FLOP/s that the model used; none where it was not counted."""
    profile: Verdict | None = None
    """Where the time of a step went, if `profile` was asked for."""


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
    callbacks: Callbacks
    survival: Survival
    facts: Facts
    home: Path | None
    """The folder for files that the run leaves; none where nothing is kept."""
    ended_of: int | None = None
    """The steps that were asked for when a callback ended this run, in a call before."""


def train(training: Training) -> FitResult:
    """Run the steps that are still missing, and save at the end."""
    t, heart = training, own_heartbeat()
    called = bool(t.callbacks)
    if called:
        t.saver.wait_for_staging()  # what is called may change the model
    t.callbacks.start(t.number, t.total)
    is_first = True
    while (stopped := reason_to_stop(t)) is None:
        heart.beat()
        t.number += 1
        indices = t.plan.indices(t.number)
        t.engine.advance(t.number, indices, t.report.add)
        t.ledger.add(t.number, indices)
        if is_first:
            is_first = False
            t.engine.step.dice.look()
        if called:
            t.callbacks.steps(t.report.losses)
        if t.evaluation and t.number % t.evaluation.every == 0:
            evaluate(t, t.evaluation)
        if t.saver.due(t.number):
            save(t)
    heart.rest()
    save(t)
    t.engine.step.give_back()
    with t.clock.aside():
        t.saver.flush()
    result = account(t, stopped)
    t.callbacks.end(result, kept=t.saver.kept)
    return result


def prepare(
    model: nn.Module,
    loss: Loss,
    source: Source,
    settings: Settings,
    chosen: Plan,
    agent: Agent | None,
    world: World,
    keeper: Keeper | None = None,
) -> Training:
    """Put the parts of a run together, and the newest checkpoint, if there is one, into them."""
    clock = Clock()
    pace, say = settings.pace, agent.say if agent else print
    plan = make_batches(source, pace, chosen)
    total = steps_of(pace, plan)
    warn_of_limit(model, settings, world, say)
    parts = model, loss, source, settings, chosen
    teller = Teller(*parts, agent, world, plan=plan, total=total)
    engine = make_engine(*parts, batches=plan, total=total, world=world, say=say)
    step, known = engine.step, facts(settings, chosen, plan, world)
    layout = lay_out(settings.spreading.parallel, world.size).words
    saver = Saver(keeper, agent, step, known, settings, world)
    evaluation = make_evaluation(settings, step, plan, world)
    with clock.aside():
        done = found = saver.resume()
        if done is None:
            done = Position(left_at=clock.began_at, layout=layout)
            saver.save(done)  # so that also a run that is killed before its next one starts from this model
            saver.flush()  # before anybody hears of a loss: one that begins anew would have others
    go_on_from(done, engine, evaluation)
    engine.get_ready(chosen)
    report = teller.report(engine, saver, clock, done)
    survival = Survival(done, layout=layout, is_exact=settings.spreading.exact, say=say)
    if agent is not None:
        goes_on = bool(found) and not is_over(done, total, evaluation, say)
        with clock.aside():
            survival.recall(agent, goes_on=goes_on, differing=saver.differing)
        report.survival = survival
    return Training(
        *(pace, total, plan, world, engine, evaluation, saver, report),
        *(Ledger(done.ledger), clock, engine.plan),
        number=done.step,
        resumed_from=done.step,
        callbacks=Callbacks(settings.callbacks, wish=world.wishes.add, done=done.step),
        survival=survival,
        facts=known,
        home=home_of(settings.showing.run),
        ended_of=done.ended_of if done.is_ended(total) else None,
    )


def warn_of_limit(model: nn.Module, settings: Settings, world: World, say: Callable[[str], None]) -> None:
    """A limit that one process cannot keep to is no reason not to train, but one to be told."""
    if world.size == 1 and (words := broken_limit(model, settings.spreading.memory)):
        say(words)


def is_over(done: Position, total: int, evaluation: Evaluation | None, say: Callable[[str], None]) -> bool:
    """Whether a run that stands at `done` has nothing left to do; of one that a callback has ended it is said."""
    if done.is_ended(total):
        say(
            f"a callback ended this run at step {done.step} of {done.ended_of}, in a call before: nothing is left "
            f"to do. To go on, ask for more than {done.ended_of} steps; to begin anew, give another run"
        )
        return True
    return done.step >= total or (evaluation is not None and evaluation.out_of_patience)


def make_batches(source: Source, pace: Pace, chosen: Plan) -> BatchPlan:
    """Which samples each step sees."""
    size = pace.batch_size
    size = chosen.batch_size or BATCH_SIZE_TO_START_FROM if size == "auto" else size
    return BatchPlan(len(source), size, pace.seed, pace.drop_last)


def steps_of(pace: Pace, plan: BatchPlan) -> int:
    """How many steps the whole run has."""
    return pace.steps or (pace.epochs or 0) * plan.steps_per_epoch


def make_evaluation(settings: Settings, step: Step, plan: BatchPlan, world: World) -> Evaluation | None:
    looks = settings.looks
    if looks.evaluate is None:
        return None
    score = scorer(looks.evaluate, step, device=world.device, batch_size=plan.batch_size)
    agreed = score if world.size == 1 else lambda: world.as_leader(score())
    return Evaluation(agreed, looks.every or plan.steps_per_epoch, looks.better, looks.patience)


def go_on_from(done: Position, engine: Engine, evaluation: Evaluation | None) -> None:
    """Remember the best score of a run that stood at `done`, and in how many pieces it computed there."""
    if done.pieces:
        engine.cut_into(done.pieces)
    if evaluation and done.best_step is not None and done.best_score is not None:
        evaluation.best, evaluation.stale = Best(done.best_step, done.best_score), done.stale


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
    if t.world.does("stop") or t.world.does("end") or t.ended_of is not None:
        return "asked"
    if t.evaluation and t.evaluation.out_of_patience:
        return "patience"
    return None


def evaluate(t: Training, evaluation: Evaluation) -> None:
    t.report.settle()
    with t.clock.aside():
        score = evaluation.judge(t.number)
        t.report.log(t.number, "evaluation", score)
        t.saver.judged(is_best=evaluation.best is not None and evaluation.best.step == t.number)
    t.callbacks.steps(t.report.losses)
    t.callbacks.evaluation(t.number, score)


def save(t: Training) -> None:
    """Save the run as it stands. The metrics go first: no checkpoint is ahead of them."""
    t.report.settle()
    t.callbacks.steps(t.report.losses)
    before = t.saver.taken
    with t.clock.aside():
        t.report.tell()
        best = t.evaluation.best if t.evaluation else None
        position = Position(
            step=t.number,
            ledger=t.ledger.head,
            best_step=best.step if best else None,
            best_score=best.score if best else None,
            stale=t.evaluation.stale if t.evaluation else 0,
            pieces=t.engine.pieces,
            ended_of=t.total if t.world.does("end") else t.ended_of,
        )
        position = t.survival.remember(position)
        t.saver.save(t.report.meter.remember(position, ends=reason_to_stop(t) is not None))
    if t.saver.taken != before and t.callbacks:
        t.saver.wait_for_staging()  # what is called may change the model
        t.callbacks.checkpoint(t.number)


def account(t: Training, stopped: Stopped) -> FitResult:
    seconds, useful = t.clock.read()
    rates = t.report.conclude(t.number, t.ledger.head)
    certificate = settle_certificate(
        t.survival, t.facts, t.world, steps=t.number, ledger=t.ledger.head, home=t.home
    )
    return FitResult(
        step=t.number,
        resumed_from=t.resumed_from,
        losses=t.report.losses,
        best=t.evaluation.best if t.evaluation else None,
        stopped=stopped,
        samples_per_second=rates.samples_per_second,
        goodput=useful / seconds,
        seconds=seconds,
        ledger=t.ledger.head,
        plan=t.chosen,
        certificate=certificate,
        mfu=rates.mfu,
        profile=t.report.watch.verdict if t.report.watch else None,
    )
