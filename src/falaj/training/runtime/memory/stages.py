"""What the stages of a pipeline take, each for itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The bytes of one stage, for one micro-batch."""

    parameters: int
    trained: int
    buffers: int
    cut: int
    """Of the layers that tensor parallelism cuts."""
    largest_block: int
    outside_blocks: int
    batch: int
    """The samples themselves, which every stage reads."""
    kept: int
    """What lies there between the two passes: the samples, and what came from the stage before, with it."""
    activations: int
    """The most there is in either pass, beside what stays: as `Trace.activations`, with `kept` in it."""
    early_gradients: int
    returned: int
    """The gradients that go back to the stage before; they lie there until the step ends."""


@dataclass(frozen=True, kw_only=True)
class PipelineMemory:
    """A model in stages, followed for micro-batches of `samples` samples."""

    samples: int
    stages: tuple[StageMemory, ...]
    on_host: bool
    """Whether the whole model, which the training begins with and gives back, lies in the same memory."""

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def pipeline_memory_from(values: dict[str, Any]) -> PipelineMemory:
    """What `facts` told of."""
    return PipelineMemory(**{**values, "stages": tuple(StageMemory(**each) for each in values["stages"])})
