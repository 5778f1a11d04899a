"""The parallel layout: how many processes share the data, the tensors and the layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from falaj.training.runtime.errors import InvalidTraining, TrainingFault

Axis = Literal["ddp", "fsdp", "tensor", "pipeline"]
Parallel: TypeAlias = Literal["auto"] | Axis | Mapping[Axis, int]
"""One strategy for all processes, or the number of processes of each: {"fsdp": 2, "tensor": 2}."""

AXES: tuple[Axis, ...] = ("ddp", "fsdp", "tensor", "pipeline")


@dataclass(frozen=True)
class ParallelLayout:
    """The mesh has pipeline × data × tensor processes; adjacent ranks share tensors, which communicate the most."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    shards: bool = False
    """Whether the data-parallel processes hold a shard of the model each (fsdp), not a replica."""

    def data_rank(self, rank: int) -> int:
        return rank // self.tensor % self.data

    def reports_loss(self, rank: int) -> bool:
        """Return whether the loss of `rank` counts: the first tensor rank of the last pipeline stage."""
        return rank % self.tensor == 0 and rank // (self.tensor * self.data) == self.pipeline - 1

    @property
    def summary(self) -> str:
        data = ("fsdp" if self.shards else "ddp", self.data)
        parts = [data, ("tensor", self.tensor), ("pipeline", self.pipeline)]
        return " × ".join(f"{name} {count}" for name, count in parts if count > 1) or "one process"


def parallel_layout(parallel: Parallel, processes: int) -> ParallelLayout:
    """Return the layout that `parallel` describes. Raise InvalidTraining if it does not match `processes`."""
    requested = _counts(parallel, processes)
    product = math.prod(requested.values())
    if product != processes:
        given = " × ".join(f"{name} {count}" for name, count in requested.items()) + f" = {product}"
        raise _invalid_parallel(given, f"a product of {processes}, the number of processes")
    shards = requested.get("fsdp", 1)
    return ParallelLayout(
        data=requested.get("ddp", 1) * shards,
        tensor=requested.get("tensor", 1),
        pipeline=requested.get("pipeline", 1),
        shards=shards > 1,
    )


def _counts(parallel: Parallel, processes: int) -> dict[str, int]:
    requested = {"ddp": processes} if parallel == "auto" else parallel
    counts: dict[Any, Any] = dict(requested) if isinstance(requested, Mapping) else {requested: processes}
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
