"""The ways to train a model that are considered when memory is short, the nearest to what was asked for first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from falaj.training.runtime.plan.plans import Plan, Precision
from falaj.training.runtime.spread.layout import Axis, Layout, Parallel, lay_out

TIMES_AS_MANY = (1, 2, 4, 8, 16)
"""So many times the processes that were asked for are considered."""
TENSOR_SIZES = (2, 4, 8)
MOST_STAGES = 8


class Choice(NamedTuple):
    processes: int
    layout: Layout
    precision: Precision
    micro_batches: int
    as_asked: bool


class Model(Protocol):
    """What there is to know of a training: its plan, its batch, and whether its layers can be cut."""

    @property
    def plan(self) -> Plan: ...
    @property
    def batch_size(self) -> int: ...
    def splits(self, parallel: Parallel, processes: int) -> bool:
        """Whether batches are cut into smaller pieces by themselves where memory is short."""

    def pieces(self, layout: Layout) -> int:
        """How many micro-batches there are where memory is not short."""

    def can_part(self) -> bool:
        """Whether there may be anything but copies of the whole model."""

    def can_shard(self) -> bool: ...
    def can_cut(self, size: int) -> bool: ...
    def can_stage(self, layout: Layout) -> bool: ...


def choices(model: Model, parallel: Parallel, processes: int) -> Iterator[Choice]:
    """As asked; what auto, or one process that runs out of memory, comes to; then bf16; then more processes."""
    asked, precision = lay_out(parallel, processes), model.plan.precision
    yield Choice(processes, asked, precision, model.pieces(asked), as_asked=True)
    splits, free = model.splits(parallel, processes), parallel == "auto"
    for layout, count in automatic(model, processes) if free else in_pieces(model, [asked]):
        by_itself = free if count == model.pieces(layout) else splits
        yield Choice(processes, layout, precision, count, as_asked=by_itself)
    for layout, count in automatic(model, processes):
        yield Choice(processes, layout, precision, count, as_asked=False)
    kinds = dict.fromkeys((precision, "bf16") if precision in ("fp32", "tf32") else (precision,))
    for times in TIMES_AS_MANY:
        more = processes * times
        if times == 1 or more <= model.batch_size:
            for kind in kinds:
                for layout, count in automatic(model, more, only_ends=True):
                    yield Choice(more, layout, kind, count, as_asked=False)


def automatic(model: Model, processes: int, *, only_ends: bool = False) -> Iterator[tuple[Layout, int]]:
    """What parallel="auto" tries, in this order: copies, shards, shards of cut layers; all in smaller pieces; then the
    same for the stages of a pipeline, which wait for each other."""
    yield from in_pieces(model, without_stages(model, processes), only_ends=only_ends)
    if model.can_part():
        yield from in_pieces(model, list(with_stages(model, processes)), only_ends=only_ends)


def without_stages(model: Model, processes: int) -> list[Layout]:
    if processes == 1:
        return [Layout()]
    found = [lay_out("ddp", processes)]
    return [*found, *_parted(model, processes)] if model.can_part() else found


def _parted(model: Model, processes: int) -> Iterator[Layout]:
    """Shards; then shards of cut layers, or layers that are only cut; copies of these where there can be no shards."""
    whole: Axis = "fsdp" if model.can_shard() else "ddp"
    if whole == "fsdp":
        yield lay_out(whole, processes)
    for size in TENSOR_SIZES:
        if processes % size == 0 and model.can_cut(size):
            shared = processes // size
            yield lay_out({whole: shared, "tensor": size} if shared > 1 else "tensor", processes)


def with_stages(model: Model, processes: int) -> Iterator[Layout]:
    """The fewest stages first, of copies, shards, or cut layers."""
    for stages in range(2, min(processes, MOST_STAGES) + 1):
        each = processes // stages
        if processes % stages or not model.can_stage(Layout(data=each, pipeline=stages)):
            continue
        inside = [Layout()] if each == 1 else without_stages(model, each)
        yield from (replace(layout, pipeline=stages) for layout in inside)


def in_pieces(
    model: Model, layouts: Sequence[Layout], *, only_ends: bool = False
) -> Iterator[tuple[Layout, int]]:
    """Each layout as it is, then each in twice as many micro-batches, again and again; or only in single samples."""
    times = 1
    while times <= model.batch_size:
        for layout in layouts:
            first = model.pieces(layout)
            each = -(-first // layout.data)
            count = first if times == 1 else each * times * layout.data
            is_end = times == 1 or 2 * count > model.batch_size
            if (times == 1 or count <= model.batch_size) and (is_end or not only_ends):
                yield layout, count
        times *= 2
