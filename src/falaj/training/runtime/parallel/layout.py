"""How many processes share the data, each layer's tensors, and the layers: the axes of the mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from falaj.training.runtime.errors import InvalidTraining, TrainingFault

Axis = Literal["ddp", "fsdp", "tensor", "pipeline"]
Parallel: TypeAlias = Literal["auto"] | Axis | Mapping[Axis, int]
"""One way for all processes, or several with the number of processes of each: {"fsdp": 2, "tensor": 2}."""

AXES: tuple[Axis, ...] = ("ddp", "fsdp", "tensor", "pipeline")


@dataclass(frozen=True)
class ParallelLayout:
    """The mesh has pipeline × data × tensor processes; neighbours in number share tensors, which talk the most."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    shards: bool = False
    """Whether those that share the data hold a shard of the model each, not a copy."""

    def data_rank(self, rank: int) -> int:
        return rank // self.tensor % self.data

    def reports_loss(self, rank: int) -> bool:
        """Whether the loss of process `rank` counts: one of those with the same tensors, at the end of the pipeline."""
        return rank % self.tensor == 0 and rank // (self.tensor * self.data) == self.pipeline - 1

    @property
    def summary(self) -> str:
        data = ("fsdp" if self.shards else "ddp", self.data)
        parts = [data, ("tensor", self.tensor), ("pipeline", self.pipeline)]
        return " × ".join(f"{name} {count}" for name, count in parts if count > 1) or "one process"


def parallel_layout(parallel: Parallel, processes: int) -> ParallelLayout:
    """The layout that `parallel` asks for; refused where it does not come out at so many processes."""
    asked = _counts(parallel, processes)
    product = math.prod(asked.values())
    if product != processes:
        given = " × ".join(f"{name} {count}" for name, count in asked.items()) + f" = {product}"
        raise _invalid_parallel(given, f"a product of {processes}, the number of processes")
    shards = asked.get("fsdp", 1)
    return ParallelLayout(
        data=asked.get("ddp", 1) * shards,
        tensor=asked.get("tensor", 1),
        pipeline=asked.get("pipeline", 1),
        shards=shards > 1,
    )


def _counts(parallel: Parallel, processes: int) -> dict[str, int]:
    asked = {"ddp": processes} if parallel == "auto" else parallel
    counts: dict[Any, Any] = dict(asked) if isinstance(asked, Mapping) else {asked: processes}
    wrong = [str(name) for name in counts if name not in AXES]
    wrong += [f"{name}={count}" for name, count in counts.items() if not isinstance(count, int) or count < 1]
    if wrong:
        raise _invalid_parallel(", ".join(wrong), f"auto, {', '.join(AXES)}, or their counts")
    if "ddp" in counts and "fsdp" in counts:
        raise _invalid_parallel("ddp and fsdp", "one of the two")
    return counts


def _invalid_parallel(given: str, allowed: str) -> InvalidTraining:
    fault = TrainingFault("parallel", given, allowed, 'parallel={"fsdp": 2, "tensor": 2}')
    return InvalidTraining("invalid parallel layout", faults=[fault])
