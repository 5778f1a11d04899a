"""Builds the report of a run: metrics, parameters, profile and event files."""

from __future__ import annotations

import torch
from torch import nn

from falaj.training.runtime.agent.agents import Agent
from falaj.training.runtime.checkpointing.position import Position
from falaj.training.runtime.checkpointing.saver import CheckpointSaver
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.sources import SampleSource
from falaj.training.runtime.options import FitOptions
from falaj.training.runtime.parallel.layout import parallel_layout
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.planning.plan import Plan, Precision
from falaj.training.runtime.profiling.bottleneck import BottleneckReport, RunConditions
from falaj.training.runtime.profiling.breakdown import Overlap
from falaj.training.runtime.profiling.profiler import ProfileRequest, StepProfiler, add_nvtx_ranges
from falaj.training.runtime.reporting.progress import ProgressDisplay
from falaj.training.runtime.reporting.report import TrainingReport
from falaj.training.runtime.reporting.run_params import run_params
from falaj.training.runtime.reporting.throughput import ModelCost, StepClock, ThroughputMeter, make_model_cost
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.engine import StepEngine


class ReportBuilder:
    """Created before the model is distributed, since the cost of a step is counted on the whole model."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        source: SampleSource,
        options: FitOptions,
        chosen: Plan,
        agent: Agent | None,
        world: ProcessGroup,
        *,
        plan: BatchPlan,
        total: int,
    ) -> None:
        self._options, self._agent, self._world = options, agent, world
        self._plan, self._total = plan, total
        self._layout = parallel_layout(options.parallelism.parallel, world.size).summary
        self._model_cost: ModelCost | None = None
        if not world.is_leader:
            return
        profiled = options.reporting.profiled_steps > 0
        self._model_cost = make_model_cost(
            model,
            loss,
            source,
            samples=-(-plan.batch_size // max(world.size, chosen.micro_batches)),
            steps=total,
            device=world.device,
            devices=world.size,
            precision=effective_precision(model, chosen),
            wanted=profiled,
        )

    def report(
        self,
        engine: StepEngine,
        saver: CheckpointSaver,
        clock: StepClock,
        done: Position,
        *,
        progress: ProgressDisplay | None,
    ) -> TrainingReport:
        """Return the report of the steps after `done`, and install the requested profiling."""
        options, world = self._options, self._world
        reporting, layout = options.reporting, self._layout
        if self._agent is not None:
            model, total = engine.step.model, self._total
            said = run_params(model, options, engine.plan, self._plan, world, layout=layout, total=total)
            self._agent.params(said)
        meter = ThroughputMeter(clock, self._plan, done, total=self._total, model_cost=self._model_cost)
        folder = reporting.events_folder if world.is_leader else None
        report = TrainingReport(
            self._agent,
            self._plan,
            saver,
            world,
            done=done.step,
            total=self._total,
            meter=meter,
            events_folder=folder,
            progress=progress,
        )
        if reporting.has_nvtx:
            add_nvtx_ranges(engine)
        if reporting.profiled_steps and world.is_leader:
            watch = StepProfiler(
                engine, clock, self._assignment(engine.plan, report, saver), left=self._total - done.step
            )
            report.watch = watch
        return report

    def _assignment(self, plan: Plan, report: TrainingReport, saver: CheckpointSaver) -> ProfileRequest:
        size = self._world.size

        def done(step: int, verdict: BottleneckReport) -> None:
            report.log_all(step, {f"profile/{name}": share for name, share in verdict.shares.items()})
            if self._agent is not None:
                self._agent.params({"profile": verdict.sentence})

        return ProfileRequest(
            self._options.reporting.profiled_steps,
            self._options.reporting.folder,
            RunConditions(plan, processes=size, layout=self._layout),
            self._model_cost,
            self._plan.batch_size,
            size,
            self._agent.notify if self._agent else print,
            done,
            lambda: Overlap(saver.saving_s, max(0.0, saver.saving_s - saver.stalled_s)),
        )


def effective_precision(model: nn.Module, plan: Plan) -> Precision:
    """Return the precision that determines the peak FLOP/s: that of the model if it is lower than the plan's."""
    half: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    own = {half.get(parameter.dtype, plan.precision) for parameter in model.parameters()}
    return own.pop() if len(own) == 1 else plan.precision
