"""The training loop: set up, resume, run the steps, and return the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from falaj.training.runtime.agent.agents import Agent, FolderAgent
from falaj.training.runtime.agent.heartbeat import rank_heartbeat
from falaj.training.runtime.callbacks import Callbacks
from falaj.training.runtime.checkpointing.certificate import Certificate, issue_certificate, output_folder
from falaj.training.runtime.checkpointing.position import Facts, Position
from falaj.training.runtime.checkpointing.resume_history import ResumeHistory
from falaj.training.runtime.checkpointing.sample_ledger import SampleLedger
from falaj.training.runtime.checkpointing.saver import CheckpointSaver
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.sources import SampleSource
from falaj.training.runtime.evaluation import BestScore, Evaluation, make_scorer
from falaj.training.runtime.options import INITIAL_BATCH_SIZE, BatchOptions, FitOptions
from falaj.training.runtime.parallel.layout import parallel_layout
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.profiling.bottleneck import BottleneckReport
from falaj.training.runtime.reporting.progress import ProgressDisplay
from falaj.training.runtime.reporting.report import TrainingReport
from falaj.training.runtime.reporting.report_builder import ReportBuilder
from falaj.training.runtime.reporting.throughput import StepClock
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.engine import StepEngine, make_engine
from falaj.training.runtime.step.model_checks import memory_limit_warning
from falaj.training.runtime.step.step import Step

if TYPE_CHECKING:
    from falaj.training.runtime.checkpointing.checkpointer import Checkpointer

StopReason = Literal["done", "patience", "asked"]


@dataclass(frozen=True, repr=False)
class FitResult:
    """The result of a call of `fit`. Losses, speed and goodput are of this call, not of the calls that it resumed."""

    step: int
    """The last step, counted from the beginning of the run."""
    resumed_from: int
    """The step of the checkpoint that this call resumed; 0 for a new run."""
    losses: list[float]
    """The loss of each step of this call; the first is of step `resumed_from + 1`."""
    best: BestScore | None
    """The best score of `evaluate` and its step; None without evaluation."""
    stopped: StopReason
    """done: all steps were computed; patience: early stopping; asked: a callback returned `STOP`."""
    samples_per_second: float
    goodput: float
    """Time in training steps divided by total time; the rest went to evaluation, checkpoints and resuming."""
    seconds: float
    ledger: str
    """The head of the hash chain over the samples of all the steps; see `expected_head`."""
    plan: Plan
    """The plan by which the steps were computed."""
    certificate: Certificate
    """The interruptions of the run, and whether recomputed losses were equal."""
    mfu: float | None = None
    """Model FLOPs utilization: the share of the hardware's peak FLOP/s; None where it was not counted."""
    profile: BottleneckReport | None = None
    """Where the time of a step went, if `profile` was given."""

    def __repr__(self) -> str:
        """Return a short description; `losses` has one number per step."""
        return f"<FitResult: {', '.join(f'{name} {value}' for name, value in self._shown())}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        rows = "".join(f"<tr><th>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in self._shown())
        return f"<table><caption>FitResult</caption><tbody>{rows}</tbody></table>"

    def _shown(self) -> list[tuple[str, str]]:
        shown = [("step", f"{self.step:,}")]
        if self.resumed_from:
            shown.append(("resumed from", f"{self.resumed_from:,}"))
        if self.losses:
            shown.append(("loss", f"{self.losses[0]:.4g} → {self.losses[-1]:.4g}"))
        if self.best is not None:
            shown.append(("best", f"{self.best.score:.4g} at step {self.best.step:,}"))
        shown += [("samples/s", f"{self.samples_per_second:,.0f}"), ("plan", self.plan.summary)]
        return [*shown, ("stopped", self.stopped)]


@dataclass
class TrainingRun:
    """A run that is ready to continue after step `number`."""

    batching: BatchOptions
    total: int
    plan: BatchPlan
    world: ProcessGroup
    engine: StepEngine
    evaluation: Evaluation | None
    saver: CheckpointSaver
    report: TrainingReport
    ledger: SampleLedger
    clock: StepClock
    chosen: Plan
    number: int
    resumed_from: int
    callbacks: Callbacks
    resume_history: ResumeHistory
    facts: Facts
    home: Path | None
    """The folder for the files of the run; None where the run is not stored."""
    ended_of: int | None = None
    """The requested number of steps of the earlier call in which a callback ended this run."""


def train(training: TrainingRun) -> FitResult:
    """Run the remaining steps, and save at the end."""
    t, heart = training, rank_heartbeat()
    called = bool(t.callbacks)
    if called:
        t.saver.wait_for_staging()  # a callback may change the model
    t.callbacks.start(t.number, t.total)
    is_first = True
    while (stopped := reason_to_stop(t)) is None:
        heart.beat()
        t.number += 1
        indices = t.plan.indices(t.number)
        t.engine.run_step(t.number, indices, t.report.add)
        t.ledger.add(t.number, indices)
        if is_first:
            is_first = False
            t.engine.step.rng.detect_python_draws()
        if called:
            t.callbacks.steps(t.report.losses)
        if t.evaluation and t.number % t.evaluation.every == 0:
            evaluate(t, t.evaluation)
        if t.saver.due(t.number):
            save(t)
    heart.stop()
    save(t)
    t.engine.step.finish_model()
    with t.clock.excluded():
        t.saver.flush()
    result = make_result(t, stopped)
    t.callbacks.end(result, last_checkpoint=t.saver.last_checkpoint)
    return result


def prepare(
    model: nn.Module,
    loss: Loss,
    source: SampleSource,
    options: FitOptions,
    chosen: Plan,
    agent: Agent | None,
    world: ProcessGroup,
    checkpointer: Checkpointer | None = None,
) -> TrainingRun:
    """Build the parts of a run, and restore the newest checkpoint if there is one."""
    clock = StepClock()
    batching = options.batching
    notify: Callable[[str], None] = agent.notify if agent else print
    plan = make_batches(source, batching, chosen)
    total = total_steps(batching, plan)
    progress = None
    if options.reporting.progress and world.is_leader and isinstance(agent, FolderAgent | None):
        progress = ProgressDisplay(total)  # there is no platform that shows it
        notify = progress.around(notify)
    warn_of_limit(model, options, world, notify)
    parts = model, loss, source, options, chosen
    report_builder = ReportBuilder(*parts, agent, world, plan=plan, total=total)
    engine = make_engine(*parts, batches=plan, total=total, world=world, notify=notify)
    step, known = engine.step, run_facts(options, chosen, plan, world)
    layout = parallel_layout(options.parallelism.parallel, world.size).summary
    saver = CheckpointSaver(checkpointer, agent, step, known, options, world)
    evaluation = make_evaluation(options, step, plan, world)
    with clock.excluded():
        done = found = saver.resume()
        if done is None:
            done = Position(left_at=clock.began_at, layout=layout)
            saver.save(done)  # so that a run that is killed before its next checkpoint starts from this model
            saver.flush()  # before any loss is reported: a run that started again would have others
    apply_position(done, engine, evaluation)
    engine.prepare(chosen)
    if progress is not None:
        progress.resume(done.step)
    report = report_builder.report(engine, saver, clock, done, progress=progress)
    resume_history = ResumeHistory(done, layout=layout, is_exact=options.parallelism.exact, notify=notify)
    if agent is not None:
        goes_on = bool(found) and not is_over(done, total, evaluation, notify)
        with clock.excluded():
            resume_history.load_history(agent, goes_on=goes_on, differing=saver.differing)
        report.resume_history = resume_history
    return TrainingRun(
        *(batching, total, plan, world, engine, evaluation, saver, report),
        *(SampleLedger(done.ledger), clock, engine.plan),
        number=done.step,
        resumed_from=done.step,
        callbacks=Callbacks(options.reporting.callbacks, request=world.requests.add, done=done.step),
        resume_history=resume_history,
        facts=known,
        home=output_folder(options.reporting.run),
        ended_of=done.ended_of if done.is_ended(total) else None,
    )


def warn_of_limit(
    model: nn.Module, options: FitOptions, world: ProcessGroup, notify: Callable[[str], None]
) -> None:
    """Warn about a memory limit that a single process cannot keep."""
    if world.size == 1 and (words := memory_limit_warning(model, options.parallelism.memory)):
        notify(words)


def is_over(done: Position, total: int, evaluation: Evaluation | None, notify: Callable[[str], None]) -> bool:
    """Return whether a run at `done` has nothing left to do; report one that a callback has ended."""
    if done.is_ended(total):
        notify(
            f"a callback ended this run at step {done.step} of {done.ended_of} in an earlier call: nothing is left "
            f"to do. To continue, request more than {done.ended_of} steps; to start again, use another run"
        )
        return True
    return done.step >= total or (evaluation is not None and evaluation.out_of_patience)


def make_batches(source: SampleSource, batching: BatchOptions, chosen: Plan) -> BatchPlan:
    """Return the batch plan of the run."""
    size = batching.batch_size
    size = chosen.batch_size or INITIAL_BATCH_SIZE if size == "auto" else size
    return BatchPlan(len(source), size, batching.seed, batching.drop_last, batching.shuffle)


def total_steps(batching: BatchOptions, plan: BatchPlan) -> int:
    """Return the number of steps of the whole run."""
    return batching.steps or (batching.epochs or 0) * plan.steps_per_epoch


def make_evaluation(
    options: FitOptions, step: Step, plan: BatchPlan, world: ProcessGroup
) -> Evaluation | None:
    chosen = options.evaluation
    if chosen.evaluate is None:
        return None
    score = make_scorer(chosen.evaluate, step, device=world.device, batch_size=plan.batch_size)
    agreed = score if world.size == 1 else lambda: world.broadcast_number(score())
    return Evaluation(agreed, chosen.evaluate_every or plan.steps_per_epoch, chosen.better, chosen.patience)


def apply_position(done: Position, engine: StepEngine, evaluation: Evaluation | None) -> None:
    """Restore the best score and the number of micro-batches of a run that stood at `done`."""
    if done.pieces:
        engine.set_micro_batches(done.pieces)
    if evaluation and done.best_step is not None and done.best_score is not None:
        evaluation.best, evaluation.stale = BestScore(done.best_step, done.best_score), done.stale


def run_facts(options: FitOptions, chosen: Plan, plan: BatchPlan, world: ProcessGroup) -> Facts:
    """Return the facts that must be equal for a resumed run to be bitwise equal."""
    parallelism = options.parallelism
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
        "exact": parallelism.exact,
        **(
            {}
            if parallelism.exact
            else {"processes": parallel_layout(parallelism.parallel, world.size).summary}
        ),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def reason_to_stop(t: TrainingRun) -> StopReason | None:
    if t.number >= t.total:
        return "done"
    if t.world.is_agreed("stop") or t.world.is_agreed("end") or t.ended_of is not None:
        return "asked"
    if t.evaluation and t.evaluation.out_of_patience:
        return "patience"
    return None


def evaluate(t: TrainingRun, evaluation: Evaluation) -> None:
    t.report.read_losses()
    with t.clock.excluded():
        score = evaluation.evaluate(t.number)
        t.report.log(t.number, "evaluation", score)
        t.saver.note_evaluation(is_best=evaluation.best is not None and evaluation.best.step == t.number)
    t.callbacks.steps(t.report.losses)
    t.callbacks.evaluation(t.number, score)


def save(t: TrainingRun) -> None:
    """Save the run. Metrics are sent first, so that no checkpoint is ahead of them."""
    t.report.read_losses()
    t.callbacks.steps(t.report.losses)
    before = t.saver.last_started
    with t.clock.excluded():
        t.report.send()
        best = t.evaluation.best if t.evaluation else None
        position = Position(
            step=t.number,
            ledger=t.ledger.head,
            best_step=best.step if best else None,
            best_score=best.score if best else None,
            stale=t.evaluation.stale if t.evaluation else 0,
            pieces=t.engine.pieces,
            ended_of=t.total if t.world.is_agreed("end") else t.ended_of,
        )
        position = t.resume_history.remember(position)
        t.saver.save(t.report.meter.remember(position, ends=reason_to_stop(t) is not None))
    if t.saver.last_started != before and t.callbacks:
        t.saver.wait_for_staging()  # a callback may change the model
        t.callbacks.checkpoint(t.number)


def make_result(t: TrainingRun, stopped: StopReason) -> FitResult:
    seconds, useful = t.clock.read()
    rates = t.report.finish(t.number, t.ledger.head)
    certificate = issue_certificate(
        t.resume_history, t.facts, t.world, steps=t.number, ledger=t.ledger.head, home=t.home
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
