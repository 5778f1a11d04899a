"""What was estimated: the memory that training a model takes, in one process or several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from falaj.training.runtime.memory.words import format_bytes
from falaj.training.runtime.planning.plan import Precision


@dataclass(frozen=True, kw_only=True)
class ConfigurationEstimate:
    """A way to train: on so many processes, laid out like this, and the most bytes that one of them takes."""

    processes: int
    layout: str
    precision: Precision
    micro_batches: int
    peak_bytes: int
    as_asked: bool
    """Whether the training comes to this by itself: as it was asked for, or as parallel="auto" may choose."""

    @property
    def summary(self) -> str:
        parts = [self.layout, self.precision]
        parts += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return f"{', '.join(parts)} ({format_bytes(self.peak_bytes)} a process)"


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory that a training takes on a `device`, cuda or cpu. `ways` begins with the one that was asked for."""

    device: str
    batch_size: int
    parameters_bytes: int
    gradients_bytes: int
    state_bytes: int
    activations_bytes: int
    data_bytes: int
    """The whole data, which lies on a GPU beside all this if it takes at most a quarter of it."""
    method: str
    """traced: on fake tensors; sampled: computed on a few samples, since the model cannot be traced."""
    ways: tuple[ConfigurationEstimate, ...] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """The most that one process takes, as it was asked for."""
        return self.ways[0].peak_bytes

    def fitting(self, memory_bytes: int) -> Iterator[ConfigurationEstimate]:
        """The ways that fit in so many bytes, the nearest to what was asked for first."""
        return (way for way in self.ways if way.peak_bytes <= memory_bytes)

    def facts(self) -> dict[str, Any]:
        return asdict(self)
