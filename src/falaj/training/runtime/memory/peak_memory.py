"""Peak memory of a process in a parallel layout, from the memory of a step in one process.

P: bytes of the parameters (Pt: of those that are trained); B: buffers; G = Pt: gradients; S: optimizer state; U:
temporary memory of the update; W: workspaces of GPU libraries; n: samples of a micro-batch; A(n): activations of n
samples with the samples themselves; E: gradients that exist when the activations are at their peak. A process takes W
plus the maximum of

    one        P + B + S + A(n) + E                                  while it computes
               P + B + S + G + U                                     while it updates
    micro-     E = G, because all but the first add to existing gradients; all samples are in memory
    batches
    ddp        P + B + S + 2 G                                       while gradients are reduced, in flat copies
               and + E while it computes, for the copies that exist already
    exact      + 2 G while it computes: sums of subtrees, and the leaf that is added
    fsdp N     (P + G + S + U) / N + B; while it computes also what is gathered: R, the parameters outside the repeated
               blocks, with their gradients, and 2 of the largest block M (one is prefetched) with 2 of its gradients
               (one is being sent): 2 R + 4 M. With several micro-batches gradients stay unsharded: G instead of G / N
               P + B + max(M, R) / N                                 at the start, when the whole model exists once
    tensor T   split layers count as C / T instead of C, in parameters, gradients, state and update; and the share H of
               the activations that is between them: A(n) (1 - H + H / T)
    pipeline L the maximum over the stages, each with its own P, B, G, S, U and A(n), traced as they are partitioned.
               At most one more micro-batch than there are later stages is in flight: all but one of these hold what
               their backward pass needs. The others hold their samples, or the gradients that were sent back, until the
               step ends. If the device is the host, the whole model exists at the start and at the end: P + B + the G
               and S of the stage

A(n) is linear in n: it is traced for one or two n, and interpolated.
"""

from __future__ import annotations

from falaj.training.runtime.memory.step_memory import PipelineMemory, StageMemory, StepMemory, StepTrace
from falaj.training.runtime.parallel.layout import ParallelLayout


def samples_per_micro_batch(batch_size: int, layout: ParallelLayout, micro_batches: int) -> int:
    """Return n: the largest number of samples of a micro-batch, if they are divided evenly over the data-parallel
    processes."""
    each = -(-micro_batches // layout.data)
    return -(-batch_size // (each * layout.data))


def peak_bytes(
    parts: StepMemory, layout: ParallelLayout, *, batch_size: int, micro_batches: int = 1, exact: bool = False
) -> int:
    """Return the peak memory of a process of `layout` for its part of the global batch."""
    mine = -(-micro_batches // layout.data)  # micro-batches of this process
    samples = samples_per_micro_batch(batch_size, layout, micro_batches)
    in_flight = parts.activations(samples) * activation_share(parts, layout)
    in_flight += (mine - 1) * parts.samples_bytes(samples)
    busy = busy_bytes(parts, layout, in_flight, several=mine > 1, exact=exact)
    return round(max(busy, _initial_bytes(parts, layout))) + parts.traces[0].workspace


def busy_bytes(
    parts: StepMemory, layout: ParallelLayout, in_flight: float, *, several: bool, exact: bool = False
) -> float:
    """Return the peak while computing, with `in_flight` bytes of activations, or updating; without workspaces."""
    trace, share = parts.traces[0], parameter_share(parts, layout)
    gradients, early = trace.trained * share, trace.early_gradients * share
    updating = gradients + trace.update * share
    if layout.shards:
        waiting = trace.trained * share * layout.data if several else gradients
        computing = in_flight + waiting + _gathered_bytes(parts, layout)
    else:
        computing = in_flight + (gradients if several else early)
        if exact:
            computing += 2 * gradients
        elif layout.data > 1:
            computing += early
            updating = max(updating, 2 * gradients)
    return (trace.parameters + trace.state) * share + trace.buffers + max(computing, updating)


def parameter_share(parts: StepMemory, layout: ParallelLayout) -> float:
    """Return the share of the parameters, gradients and state that a process holds."""
    cut = parts.cut / max(1, parts.traces[0].parameters)
    whole = 1 - cut + cut / layout.tensor
    return whole / layout.data if layout.shards else whole


def activation_share(parts: StepMemory, layout: ParallelLayout) -> float:
    """Return the share of the activations that a process holds if layers are split."""
    return 1 - parts.cut_activations * (1 - 1 / layout.tensor)


def _gathered_bytes(parts: StepMemory, layout: ParallelLayout) -> float:
    """Return the bytes that fsdp gathers while computing; at most the whole model with its gradients."""
    trace, whole = parts.traces[0], parameter_share(parts, layout) * layout.data
    gathered = 2 * parts.outside_blocks + 4 * parts.largest_block
    return whole * min(gathered, 2 * trace.parameters + trace.trained)


def _initial_bytes(parts: StepMemory, layout: ParallelLayout) -> float:
    """Return the bytes before a model is split: the whole model and the first pieces."""
    if not (layout.shards or layout.tensor > 1):
        return 0.0
    trace = parts.traces[0]
    return trace.parameters + trace.buffers + max(parts.largest_block, parts.outside_blocks) / layout.data


def pipeline_peak(
    parts: StepMemory,
    staged: PipelineMemory,
    layout: ParallelLayout,
    *,
    batch_size: int,
    micro_batches: int,
    traced: StepMemory,
) -> int:
    """Return the peak memory of a process of `layout` over all stages; `parts` is the memory of the whole model.

    `traced` is the memory in the precision in which the stages were traced; other precisions scale in
    proportion.
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
    """Return the memory of a stage as if it were a model."""
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
    """Return the bytes of the whole model, with the gradients, state and sharded parameters of this process."""
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
    """Return an estimate for stages that could not be traced, as if they were equal."""
    mine = -(-micro_batches // layout.data)
    each = parts.activations(samples_per_micro_batch(batch_size, layout, micro_batches)) * activation_share(
        parts, layout
    )
    busy = busy_bytes(parts, layout, each * min(layout.pipeline, mine), several=mine > 1)
    return round(busy / layout.pipeline) + parts.traces[0].workspace
