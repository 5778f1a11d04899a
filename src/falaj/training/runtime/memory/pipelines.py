"""What a process of a pipeline takes: that of the stage that takes the most."""

from __future__ import annotations

from falaj.training.runtime.memory.peak_memory import (
    StepMemory,
    activation_share,
    busy_bytes,
    parameter_share,
    samples_per_micro_batch,
)
from falaj.training.runtime.memory.stages import PipelineMemory, StageMemory
from falaj.training.runtime.memory.step_memory import StepTrace
from falaj.training.runtime.parallel.layout import ParallelLayout


def pipeline_peak(
    parts: StepMemory,
    staged: PipelineMemory,
    layout: ParallelLayout,
    *,
    batch_size: int,
    micro_batches: int,
    traced: StepMemory,
) -> int:
    """The most that a process of `layout` takes, whichever stage it has; `parts` are those of the whole model.

    `followed` are these in the precision in which the stages were followed; in another one they take in proportion.
    """
    samples = samples_per_micro_batch(batch_size, layout, micro_batches)
    grows = parts.activations(samples) / max(1, traced.activations(staged.samples))
    grows *= activation_share(parts, layout)
    mine = -(-micro_batches // layout.data)
    peaks = []
    for number, stage in enumerate(staged.stages):
        behind = len(staged.stages) - 1 - number
        waiting = (mine - min(mine, behind + 1)) * (stage.batch + stage.returned)
        in_flight = (min(mine, behind + 1) - 1) * stage.kept + stage.activations + waiting
        own = stage_step_memory(parts, stage)
        peak = busy_bytes(own, layout, grows * in_flight, several=mine > 1)
        peaks.append(max(peak, _with_whole_model(parts, own, layout) if staged.on_host else 0.0))
    return round(max(peaks)) + parts.traces[0].workspace


def stage_step_memory(parts: StepMemory, stage: StageMemory) -> StepMemory:
    """A stage as if it were a model."""
    whole = parts.traces[0]
    share = stage.trained / max(1, whole.trained)
    trace = StepTrace(
        samples=whole.samples,
        parameters=stage.parameters,
        trained=stage.trained,
        buffers=stage.buffers,
        state=round(whole.state * share),
        activations=stage.activations,
        batch=stage.batch,
        early_gradients=stage.early_gradients,
        update=min(whole.update, max(stage.trained, round(whole.update * share))),
        workspace=whole.workspace,
    )
    return StepMemory(
        traces=(trace,),
        largest_block=stage.largest_block,
        outside_blocks=stage.outside_blocks,
        cut=stage.cut,
        method=parts.method,
    )


def _with_whole_model(parts: StepMemory, own: StepMemory, layout: ParallelLayout) -> float:
    """The whole model, with the gradients and the state of this process, and its parameters where these are pieces."""
    whole, trace = parts.traces[0], own.traces[0]
    pieces = trace.parameters if layout.shards or layout.tensor > 1 else 0
    return (
        whole.parameters
        + whole.buffers
        + parameter_share(own, layout) * (pieces + trace.trained + trace.state)
    )


def even_pipeline_peak(
    parts: StepMemory, layout: ParallelLayout, *, batch_size: int, micro_batches: int
) -> int:
    """A guess where the stages could not be followed: as if they were even."""
    mine = -(-micro_batches // layout.data)
    each = parts.activations(samples_per_micro_batch(batch_size, layout, micro_batches)) * activation_share(
        parts, layout
    )
    busy = busy_bytes(parts, layout, each * min(layout.pipeline, mine), several=mine > 1)
    return round(busy / layout.pipeline) + parts.traces[0].workspace
