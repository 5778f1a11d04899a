"""What a process of a pipeline takes: that of the stage that takes the most."""

from __future__ import annotations

from falaj.training.runtime.memory.layouts import Parts, busy_bytes, left_of_cut, samples_at_once, share_of
from falaj.training.runtime.memory.stages import Stage, Staged
from falaj.training.runtime.memory.trace import Trace
from falaj.training.runtime.spread.layout import Layout


def pipeline_peak(
    parts: Parts, staged: Staged, layout: Layout, *, batch_size: int, micro_batches: int, followed: Parts
) -> int:
    """The most that a process of `layout` takes, whichever stage it has; `parts` are those of the whole model.

    `followed` are these in the precision in which the stages were followed; in another one they take in proportion.
    """
    samples = samples_at_once(batch_size, layout, micro_batches)
    grows = parts.activations(samples) / max(1, followed.activations(staged.samples))
    grows *= left_of_cut(parts, layout)
    mine = -(-micro_batches // layout.data)
    peaks = []
    for number, stage in enumerate(staged.stages):
        behind = len(staged.stages) - 1 - number
        waiting = (mine - min(mine, behind + 1)) * (stage.batch + stage.returned)
        under_way = (min(mine, behind + 1) - 1) * stage.kept + stage.activations + waiting
        own = stage_parts(parts, stage)
        peak = busy_bytes(own, layout, grows * under_way, several=mine > 1)
        peaks.append(max(peak, _whole_beside(parts, own, layout) if staged.on_host else 0.0))
    return round(max(peaks)) + parts.traces[0].workspace


def stage_parts(parts: Parts, stage: Stage) -> Parts:
    """A stage as if it were a model."""
    whole = parts.traces[0]
    share = stage.trained / max(1, whole.trained)
    trace = Trace(
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
    return Parts(
        traces=(trace,),
        largest_block=stage.largest_block,
        outside_blocks=stage.outside_blocks,
        cut=stage.cut,
        method=parts.method,
    )


def _whole_beside(parts: Parts, own: Parts, layout: Layout) -> float:
    """The whole model, with the gradients and the state of this process, and its parameters where these are pieces."""
    whole, trace = parts.traces[0], own.traces[0]
    pieces = trace.parameters if layout.shards or layout.tensor > 1 else 0
    return whole.parameters + whole.buffers + share_of(own, layout) * (pieces + trace.trained + trace.state)


def even_peak(parts: Parts, layout: Layout, *, batch_size: int, micro_batches: int) -> int:
    """A guess where the stages could not be followed: as if they were even."""
    mine = -(-micro_batches // layout.data)
    each = parts.activations(samples_at_once(batch_size, layout, micro_batches)) * left_of_cut(parts, layout)
    busy = busy_bytes(parts, layout, each * min(layout.pipeline, mine), several=mine > 1)
    return round(busy / layout.pipeline) + parts.traces[0].workspace
