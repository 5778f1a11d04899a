"""Running out of memory: which processes may split a batch further, and the error where that does not help."""

from __future__ import annotations

import torch

from falaj.training.runtime.errors import OutOfMemory, TrainingFault
from falaj.training.runtime.parallel.layout import ParallelLayout

NO_MEMORY = (
    "can't allocate memory",
    "bad_alloc",
    "not enough memory",
    "unable to mmap",
    "unable to write to file </torch",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(failure: BaseException) -> bool:
    """Return whether `failure` means out of memory, on a GPU or a CPU; torch has no type for the latter."""
    if isinstance(failure, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(failure) for words in NO_MEMORY)


def can_split_locally(layout: ParallelLayout) -> bool:
    """Return whether a process may use more micro-batches than the others.

    That requires no collectives before the last backward pass: no shards, split tensors or stages.
    """
    return not (layout.tensor > 1 or layout.pipeline > 1 or layout.shards)


def out_of_memory_error(
    number: int, pieces: int, failure: BaseException, *, smallest: bool = False
) -> OutOfMemory:
    """Return the error for the case that more micro-batches are impossible or do not help."""
    given = f"{first_line(failure)} in {plural(pieces)}"
    allowed = "a batch that fits in memory"
    smaller = "a smaller model" if smallest else f"a smaller batch_size, accumulate={2 * pieces}"
    fix = f"{smaller}, or more memory"
    fault = TrainingFault(f"step {number}", given, allowed, fix)
    return OutOfMemory(f"out of memory at step {number}", faults=[fault])


def plural(pieces: int) -> str:
    return "one micro-batch" if pieces == 1 else f"{pieces} micro-batches"


def first_line(failure: BaseException) -> str:
    return str(failure).strip().split("\n")[0] or type(failure).__name__
