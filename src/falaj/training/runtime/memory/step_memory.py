"""Memory measurements of a training step and of pipeline stages, in bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """The bytes of a step in one process over `samples` samples, computed as one micro-batch."""

    samples: int
    parameters: int
    trained: int
    """The parameters that have gradients, so also the bytes of these: sparse gradients count as dense."""
    buffers: int
    state: int
    """The optimizer state."""
    activations: int
    """The peak of a forward and backward pass besides the above and the samples; without gradients."""
    batch: int
    """The samples alone."""
    early_gradients: int
    """The gradients that exist at that peak."""
    update: int
    """Temporary memory of the optimizer update, besides parameters, gradients and state."""
    workspace: int = 0
    """Workspaces of GPU libraries."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The memory of a step: traces for one or two batch sizes, and the sizes of the model's blocks."""

    traces: tuple[StepTrace, ...]
    largest_block: int
    """M: the bytes of the largest block that fsdp gathers at once."""
    outside_blocks: int
    """R: the bytes of the parameters outside all blocks."""
    cut: int
    """C: the bytes of the layers that tensor parallelism splits; 0 if there are none."""
    cut_activations: float = 0.0
    """H: the share of the activations between those layers, which is split with them."""
    method: str = "traced"
    """traced: on fake tensors; sampled: computed on a few real samples."""

    def activations(self, samples: int) -> int:
        """A(n): linear interpolation between the traces; through zero if there is only one."""
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
    """Return the step memory that `facts` described."""
    return StepMemory(**{**values, "traces": tuple(StepTrace(**each) for each in values["traces"])})


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The bytes of one pipeline stage, for one micro-batch."""

    parameters: int
    trained: int
    buffers: int
    cut: int
    """The bytes of the layers that tensor parallelism splits."""
    largest_block: int
    outside_blocks: int
    batch: int
    """The samples, which every stage reads."""
    kept: int
    """What is held between the two passes: the samples and the received activations."""
    activations: int
    """The peak of either pass: as `StepTrace.activations`, including `kept`."""
    early_gradients: int
    returned: int
    """The gradients sent to the previous stage; they are held until the step ends."""


@dataclass(frozen=True, kw_only=True)
class PipelineMemory:
    """The memory of all stages, traced for micro-batches of `samples` samples."""

    samples: int
    stages: tuple[StageMemory, ...]
    on_host: bool
    """Whether the whole model, which exists before and after training, is in the same memory."""

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def pipeline_memory_from(values: dict[str, Any]) -> PipelineMemory:
    """Return the pipeline memory that `facts` described."""
    return PipelineMemory(**{**values, "stages": tuple(StageMemory(**each) for each in values["stages"])})
