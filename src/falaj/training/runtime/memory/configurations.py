"""The training configurations that are considered when memory is short, closest to the request first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from falaj.training.runtime.parallel.layout import Axis, Parallel, ParallelLayout, parallel_layout
from falaj.training.runtime.planning.plan import Plan, Precision

PROCESS_FACTORS = (1, 2, 4, 8, 16)
"""Multiples of the requested number of processes that are considered."""
TENSOR_SIZES = (2, 4, 8)
MAX_STAGES = 8


class TrainingConfiguration(NamedTuple):
    processes: int
    layout: ParallelLayout
    precision: Precision
    micro_batches: int
    as_asked: bool


class ConfigurationSpace(Protocol):
    """What the enumeration of configurations needs to know about a training."""

    @property
    def plan(self) -> Plan: ...
    @property
    def batch_size(self) -> int: ...
    def may_split_batches(self, parallel: Parallel, processes: int) -> bool:
        """Return whether batches are split into more micro-batches automatically when memory is short."""

    def default_micro_batches(self, layout: ParallelLayout) -> int:
        """Return the number of micro-batches that is used when memory is not short."""

    def can_partition(self) -> bool:
        """Return whether the model may be sharded, split or staged; otherwise only replicas are possible."""

    def can_shard(self) -> bool: ...
    def can_split_tensors(self, size: int) -> bool: ...
    def can_pipeline(self, layout: ParallelLayout) -> bool: ...


def configurations(
    model: ConfigurationSpace, parallel: Parallel, processes: int
) -> Iterator[TrainingConfiguration]:
    """Yield the request itself, what `auto` or an out-of-memory retry leads to, then bf16, then more processes."""
    requested, precision = parallel_layout(parallel, processes), model.plan.precision
    yield TrainingConfiguration(
        processes, requested, precision, model.default_micro_batches(requested), as_asked=True
    )
    splits, free = model.may_split_batches(parallel, processes), parallel == "auto"
    for layout, count in (
        automatic_layouts(model, processes) if free else with_micro_batches(model, [requested])
    ):
        by_itself = free if count == model.default_micro_batches(layout) else splits
        yield TrainingConfiguration(processes, layout, precision, count, as_asked=by_itself)
    for layout, count in automatic_layouts(model, processes):
        yield TrainingConfiguration(processes, layout, precision, count, as_asked=False)
    kinds = dict.fromkeys((precision, "bf16") if precision in ("fp32", "tf32") else (precision,))
    for times in PROCESS_FACTORS:
        more = processes * times
        if times == 1 or more <= model.batch_size:
            for kind in kinds:
                for layout, count in automatic_layouts(model, more, only_ends=True):
                    yield TrainingConfiguration(more, layout, kind, count, as_asked=False)


def automatic_layouts(
    model: ConfigurationSpace, processes: int, *, only_ends: bool = False
) -> Iterator[tuple[ParallelLayout, int]]:
    """Yield what parallel="auto" tries, in order: ddp, fsdp, fsdp with tensor parallelism; the same with more
    micro-batches; then the same with pipeline stages, which have idle time."""
    yield from with_micro_batches(model, layouts_without_pipeline(model, processes), only_ends=only_ends)
    if model.can_partition():
        yield from with_micro_batches(model, list(pipeline_layouts(model, processes)), only_ends=only_ends)


def layouts_without_pipeline(model: ConfigurationSpace, processes: int) -> list[ParallelLayout]:
    if processes == 1:
        return [ParallelLayout()]
    found = [parallel_layout("ddp", processes)]
    return [*found, *_sharded_layouts(model, processes)] if model.can_partition() else found


def _sharded_layouts(model: ConfigurationSpace, processes: int) -> Iterator[ParallelLayout]:
    """Yield fsdp, then fsdp or ddp with tensor parallelism; ddp where the model cannot be sharded."""
    whole: Axis = "fsdp" if model.can_shard() else "ddp"
    if whole == "fsdp":
        yield parallel_layout(whole, processes)
    for size in TENSOR_SIZES:
        if processes % size == 0 and model.can_split_tensors(size):
            shared = processes // size
            yield parallel_layout({whole: shared, "tensor": size} if shared > 1 else "tensor", processes)


def pipeline_layouts(model: ConfigurationSpace, processes: int) -> Iterator[ParallelLayout]:
    """Yield layouts with pipeline stages, fewest stages first."""
    for stages in range(2, min(processes, MAX_STAGES) + 1):
        each = processes // stages
        if processes % stages or not model.can_pipeline(ParallelLayout(data=each, pipeline=stages)):
            continue
        inside = [ParallelLayout()] if each == 1 else layouts_without_pipeline(model, each)
        yield from (replace(layout, pipeline=stages) for layout in inside)


def with_micro_batches(
    model: ConfigurationSpace, layouts: Sequence[ParallelLayout], *, only_ends: bool = False
) -> Iterator[tuple[ParallelLayout, int]]:
    """Yield each layout as it is, then with twice as many micro-batches, repeatedly; or only the two extremes."""
    times = 1
    while times <= model.batch_size:
        for layout in layouts:
            first = model.default_micro_batches(layout)
            each = -(-first // layout.data)
            count = first if times == 1 else each * times * layout.data
            is_end = times == 1 or 2 * count > model.batch_size
            if (times == 1 or count <= model.batch_size) and (is_end or not only_ends):
                yield layout, count
        times *= 2
