"""Puts together what a run tells: its report with the figures, its parameters, and what was asked to be shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from falaj.training.runtime.agent import Agent
from falaj.training.runtime.batches import BatchPlan
from falaj.training.runtime.checkpoints import Position
from falaj.training.runtime.data import Source
from falaj.training.runtime.description import describe
from falaj.training.runtime.engine import Engine
from falaj.training.runtime.metering import Clock, Meter, Price, price_of
from falaj.training.runtime.plan.plans import Plan, Precision
from falaj.training.runtime.profiling.shares import Overlap
from falaj.training.runtime.profiling.verdicts import Circumstances, Verdict
from falaj.training.runtime.profiling.watching import Assignment, Watch, mark_for_nsight
from falaj.training.runtime.report import Report
from falaj.training.runtime.saving import Saver
from falaj.training.runtime.settings import Settings
from falaj.training.runtime.spread.layout import lay_out
from falaj.training.runtime.world import World


class Teller:
    """Made before the model is spread over processes: what a step costs is counted on the whole model."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        source: Source,
        settings: Settings,
        chosen: Plan,
        agent: Agent | None,
        world: World,
        *,
        plan: BatchPlan,
        total: int,
    ) -> None:
        self._settings, self._agent, self._world = settings, agent, world
        self._plan, self._total = plan, total
        self._layout = lay_out(settings.spreading.parallel, world.size).words
        self._price: Price | None = None
        if not world.leads:
            return
        profiled = settings.showing.profiled_steps > 0
        self._price = price_of(
            model,
            loss,
            source,
            samples=-(-plan.batch_size // max(world.size, chosen.micro_batches)),
            steps=total,
            device=world.device,
            devices=world.size,
            precision=computed_in(model, chosen),
            wanted=profiled,
        )

    def report(self, engine: Engine, saver: Saver, clock: Clock, done: Position) -> Report:
        """The report of the steps after `done`; with what is asked for, around the engine's steps."""
        settings, world = self._settings, self._world
        showing, layout = settings.showing, self._layout
        if self._agent is not None:
            model, total = engine.step.model, self._total
            said = describe(model, settings, engine.plan, self._plan, world, layout=layout, total=total)
            self._agent.params(said)
        meter = Meter(clock, self._plan, done, total=self._total, price=self._price)
        folder = showing.events_folder if world.leads else None
        report = Report(
            self._agent,
            self._plan,
            saver,
            world,
            done=done.step,
            total=self._total,
            meter=meter,
            events_folder=folder,
        )
        if showing.has_nvtx:
            mark_for_nsight(engine)
        if showing.profiled_steps and world.leads:
            watch = Watch(
                engine, clock, self._assignment(engine.plan, report, saver), left=self._total - done.step
            )
            report.watch = watch
        return report

    def _assignment(self, plan: Plan, report: Report, saver: Saver) -> Assignment:
        size = self._world.size

        def done(step: int, verdict: Verdict) -> None:
            report.log_all(step, {f"profile/{name}": share for name, share in verdict.shares.items()})
            if self._agent is not None:
                self._agent.params({"profile": verdict.sentence})

        return Assignment(
            self._settings.showing.profiled_steps,
            self._settings.showing.folder,
            Circumstances(plan, processes=size, layout=self._layout),
            self._price,
            self._plan.batch_size,
            size,
            self._agent.say if self._agent else print,
            done,
            lambda: Overlap(saver.saving_s, max(0.0, saver.saving_s - saver.stalled_s)),
        )


def computed_in(model: nn.Module, plan: Plan) -> Precision:
    """The precision of the run, for which there is a peak: that of the model, if it is the lower one."""
    half: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    own = {half.get(parameter.dtype, plan.precision) for parameter in model.parameters()}
    return own.pop() if len(own) == 1 else plan.precision
