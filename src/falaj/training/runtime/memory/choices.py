"""The ways to train a model that are considered when memory is short, the nearest to what was asked for first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from falaj.training.runtime.plan.plans import Plan, Precision
from falaj.training.runtime.spread.layout import Layout, Parallel, lay_out

TIMES_AS_MANY = (1, 2, 4, 8, 16)
"""So many times the processes that were asked for are considered."""


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

    def can_cut(self, size: int) -> bool: ...


def choices(model: Model, parallel: Parallel, processes: int) -> Iterator[Choice]:
    """As asked; what auto, or one process that runs out of memory, comes to; then bf16; then more processes."""
    asked, precision = lay_out(parallel, processes), model.plan.precision
    pieces = model.plan.micro_batches
    yield Choice(processes, asked, precision, pieces, as_asked=True)
    splits, free = model.splits(parallel, processes), parallel == "auto"
    for layout, count in automatic(model, processes) if free else in_pieces(model, [asked]):
        by_itself = free if count == pieces else splits
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
    """What parallel="auto" tries, in this order: copies, shards, shards of cut layers; then all in smaller pieces."""
    if processes == 1:
        return in_pieces(model, [Layout()], only_ends=only_ends)
    layouts = [lay_out("ddp", processes), lay_out("fsdp", processes)]
    for size in (2, 4, 8):
        if processes % size == 0 and model.can_cut(size):
            shared = processes // size
            layouts.append(lay_out({"fsdp": shared, "tensor": size} if shared > 1 else "tensor", processes))
    return in_pieces(model, layouts, only_ends=only_ends)


def in_pieces(
    model: Model, layouts: Sequence[Layout], *, only_ends: bool = False
) -> Iterator[tuple[Layout, int]]:
    """Each layout as it is, then each in twice as many micro-batches, again and again; or only in single samples."""
    times = 1
    while times <= model.batch_size:
        for layout in layouts:
            each = -(-model.plan.micro_batches // layout.data)
            count = model.plan.micro_batches if times == 1 else each * times * layout.data
            is_end = times == 1 or 2 * count > model.batch_size
            if (times == 1 or count <= model.batch_size) and (is_end or not only_ends):
                yield layout, count
        times *= 2
