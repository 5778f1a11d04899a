"""The ways to train a model that are considered when memory is short, the nearest to what was asked for first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from falaj.training.runtime.parallel.layout import Axis, Parallel, ParallelLayout, parallel_layout
from falaj.training.runtime.planning.plan import Plan, Precision

PROCESS_FACTORS = (1, 2, 4, 8, 16)
"""So many times the processes that were asked for are considered."""
TENSOR_SIZES = (2, 4, 8)
MAX_STAGES = 8


class TrainingConfiguration(NamedTuple):
    processes: int
    layout: ParallelLayout
    precision: Precision
    micro_batches: int
    as_asked: bool


class ConfigurationSpace(Protocol):
    """What there is to know of a training: its plan, its batch, and whether its layers can be cut."""

    @property
    def plan(self) -> Plan: ...
    @property
    def batch_size(self) -> int: ...
    def may_split_batches(self, parallel: Parallel, processes: int) -> bool:
        """Whether batches are cut into smaller pieces by themselves where memory is short."""

    def default_micro_batches(self, layout: ParallelLayout) -> int:
        """How many micro-batches there are where memory is not short."""

    def can_partition(self) -> bool:
        """Whether there may be anything but copies of the whole model."""

    def can_shard(self) -> bool: ...
    def can_split_tensors(self, size: int) -> bool: ...
    def can_pipeline(self, layout: ParallelLayout) -> bool: ...


def configurations(
    model: ConfigurationSpace, parallel: Parallel, processes: int
) -> Iterator[TrainingConfiguration]:
    """As asked; what auto, or one process that runs out of memory, comes to; then bf16; then more processes."""
    asked, precision = parallel_layout(parallel, processes), model.plan.precision
    yield TrainingConfiguration(
        processes, asked, precision, model.default_micro_batches(asked), as_asked=True
    )
    splits, free = model.may_split_batches(parallel, processes), parallel == "auto"
    for layout, count in automatic_layouts(model, processes) if free else with_micro_batches(model, [asked]):
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
    """What parallel="auto" tries, in this order: copies, shards, shards of cut layers; all in smaller pieces; then the
    same for the stages of a pipeline, which wait for each other."""
    yield from with_micro_batches(model, layouts_without_pipeline(model, processes), only_ends=only_ends)
    if model.can_partition():
        yield from with_micro_batches(model, list(pipeline_layouts(model, processes)), only_ends=only_ends)


def layouts_without_pipeline(model: ConfigurationSpace, processes: int) -> list[ParallelLayout]:
    if processes == 1:
        return [ParallelLayout()]
    found = [parallel_layout("ddp", processes)]
    return [*found, *_sharded_layouts(model, processes)] if model.can_partition() else found


def _sharded_layouts(model: ConfigurationSpace, processes: int) -> Iterator[ParallelLayout]:
    """Shards; then shards of cut layers, or layers that are only cut; copies of these where there can be no shards."""
    whole: Axis = "fsdp" if model.can_shard() else "ddp"
    if whole == "fsdp":
        yield parallel_layout(whole, processes)
    for size in TENSOR_SIZES:
        if processes % size == 0 and model.can_split_tensors(size):
            shared = processes // size
            yield parallel_layout({whole: shared, "tensor": size} if shared > 1 else "tensor", processes)


def pipeline_layouts(model: ConfigurationSpace, processes: int) -> Iterator[ParallelLayout]:
    """The fewest stages first, of copies, shards, or cut layers."""
    for stages in range(2, min(processes, MAX_STAGES) + 1):
        each = processes // stages
        if processes % stages or not model.can_pipeline(ParallelLayout(data=each, pipeline=stages)):
            continue
        inside = [ParallelLayout()] if each == 1 else layouts_without_pipeline(model, each)
        yield from (replace(layout, pipeline=stages) for layout in inside)


def with_micro_batches(
    model: ConfigurationSpace, layouts: Sequence[ParallelLayout], *, only_ends: bool = False
) -> Iterator[tuple[ParallelLayout, int]]:
    """Each layout as it is, then each in twice as many micro-batches, again and again; or only in single samples."""
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
