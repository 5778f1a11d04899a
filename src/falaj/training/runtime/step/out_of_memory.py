"""What can be done where memory runs out: who may cut a batch smaller, and the error where that does not help."""

from __future__ import annotations

from falaj.training.runtime.errors import OutOfMemory, TrainingFault
from falaj.training.runtime.parallel.layout import ParallelLayout


def can_split_locally(layout: ParallelLayout) -> bool:
    """Whether a process may compute its part in more pieces than the others: nothing is done together with them before
    the last backward pass. Shards and cut tensors are gathered then, and stages wait for each other."""
    return not (layout.tensor > 1 or layout.pipeline > 1 or layout.shards)


def out_of_memory_error(
    number: int, pieces: int, failure: BaseException, *, smallest: bool = False
) -> OutOfMemory:
    """The error where smaller pieces are not possible, or not smaller."""
    given = f"{first_line(failure)} in {plural(pieces)}"
    allowed = "a batch that fits into the memory there is"
    smaller = "a smaller model" if smallest else f"a smaller batch_size, accumulate={2 * pieces}"
    fix = f"{smaller}, or more memory"
    fault = TrainingFault(f"step {number}", given, allowed, fix)
    return OutOfMemory(f"out of memory at step {number}", faults=[fault])


def plural(pieces: int) -> str:
    return "one micro-batch" if pieces == 1 else f"{pieces} micro-batches"


def first_line(failure: BaseException) -> str:
    return str(failure).strip().split("\n")[0] or type(failure).__name__
