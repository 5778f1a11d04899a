"""What a step takes in each of several processes, from what it takes in one.

With P the parameters' bytes (Pt of those that are trained), B the buffers', G = Pt the gradients', S the optimizer's
state, U what its update has for a moment, W the GPU libraries' workspaces, A(n) the activations of n samples with the
samples themselves, E the gradients that are there already when the activations are at their most, and n the samples
that a process computes at once, a process takes at most W plus the largest of

    alone      P + B + S + A(n) + E                                  while it computes
               P + B + S + G + U                                     while it updates
    several    micro-batches: E = G, since all but the first add to gradients that are there; all samples are there
    ddp        P + B + S + 2 G                                       while gradients are added, in flat copies of them
               and + E while it computes, for those copies that are made already
    exact      + 2 G while it computes: sums of subtrees that wait, and the leaf that is added
    fsdp N     (P + G + S + U) / N + B; while it computes also what is gathered: R, the parameters outside the repeated
               blocks, with their gradients, and 2 of the largest block M (the next one is fetched ahead) with 2 of its
               gradients (the sum that is sent): 2 R + 4 M. With several micro-batches gradients wait whole: G for G / N
               P + B + max(M, R) / N                                 before it starts: the model is there whole, once
    tensor T   the layers that are cut count as C / T instead of C, in parameters, gradients, state and update; so does
               what lies between them, the part H of the activations: A(n) (1 - H + H / T)
    pipeline L the stage that takes the most, with its own P, B, G, S, U and A(n): the stages are followed one by one,
               as they are really cut. Of the micro-batches some are under way, at most one more than there are stages
               behind: all of these but one have what they leave for their backward pass. The others have their samples,
               or the gradients that were sent back and lie there until the step ends. Where the device is the host
               itself, the whole model is there when it begins and when it ends: P + B + the G and S of the stage

A(n) is linear in n: it is followed for one or two n, and a line is drawn through them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from falaj.training.runtime.memory.step_memory import StepTrace
from falaj.training.runtime.parallel.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """What the memory of a step is made of: traces of it for one or two numbers of samples, and the model's cuts."""

    traces: tuple[StepTrace, ...]
    largest_block: int
    """M: the bytes of the largest block that fsdp gathers by itself."""
    outside_blocks: int
    """R: those of the parameters that are in no block."""
    cut: int
    """C: those of the layers that tensor parallelism cuts; 0 where it finds none."""
    cut_activations: float = 0.0
    """H: the part of the activations that lies between those layers, and is cut with them."""
    method: str = "traced"
    """traced, on fake tensors; or sampled, computed on a few real samples."""

    def activations(self, samples: int) -> int:
        """A(n): on the line through the traces; through zero, where there is one."""
        first, last = self.traces[0], self.traces[-1]
        if samples == first.samples:
            return first.activations
        if first.samples == last.samples:
            return round(first.activations * samples / first.samples)
        slope = (last.activations - first.activations) / (last.samples - first.samples)
        return max(0, round(first.activations + slope * (samples - first.samples)))

    def samples_bytes(self, samples: int) -> float:
        return self.traces[0].batch * samples / self.traces[0].samples

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def step_memory_from(values: dict[str, Any]) -> StepMemory:
    """The parts that `facts` told of."""
    return StepMemory(**{**values, "traces": tuple(StepTrace(**each) for each in values["traces"])})


def samples_per_micro_batch(batch_size: int, layout: ParallelLayout, micro_batches: int) -> int:
    """n: the most samples of a micro-batch; as many of these as divide evenly among those who share the data."""
    each = -(-micro_batches // layout.data)
    return -(-batch_size // (each * layout.data))


def peak_bytes(
    parts: StepMemory, layout: ParallelLayout, *, batch_size: int, micro_batches: int = 1, exact: bool = False
) -> int:
    """The most that a process of `layout` takes for its part of the global batch, in so many micro-batches."""
    mine = -(-micro_batches // layout.data)  # micro-batches of this process
    samples = samples_per_micro_batch(batch_size, layout, micro_batches)
    in_flight = parts.activations(samples) * activation_share(parts, layout)
    in_flight += (mine - 1) * parts.samples_bytes(samples)
    busy = busy_bytes(parts, layout, in_flight, several=mine > 1, exact=exact)
    return round(max(busy, _initial_bytes(parts, layout))) + parts.traces[0].workspace


def busy_bytes(
    parts: StepMemory, layout: ParallelLayout, in_flight: float, *, several: bool, exact: bool = False
) -> float:
    """While it computes, with `under_way` of activations, or while it updates; without workspaces."""
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
    """The part of the parameters, and of what goes with them, that a process holds."""
    cut = parts.cut / max(1, parts.traces[0].parameters)
    whole = 1 - cut + cut / layout.tensor
    return whole / layout.data if layout.shards else whole


def activation_share(parts: StepMemory, layout: ParallelLayout) -> float:
    """The part of the activations that a process has where layers are cut."""
    return 1 - parts.cut_activations * (1 - 1 / layout.tensor)


def _gathered_bytes(parts: StepMemory, layout: ParallelLayout) -> float:
    """What fsdp has of others while it computes; no more than the whole model with its gradients, and some."""
    trace, whole = parts.traces[0], parameter_share(parts, layout) * layout.data
    gathered = 2 * parts.outside_blocks + 4 * parts.largest_block
    return whole * min(gathered, 2 * trace.parameters + trace.trained)


def _initial_bytes(parts: StepMemory, layout: ParallelLayout) -> float:
    """What there is before a model is cut, with the first pieces."""
    if not (layout.shards or layout.tensor > 1):
        return 0.0
    trace = parts.traces[0]
    return trace.parameters + trace.buffers + max(parts.largest_block, parts.outside_blocks) / layout.data
