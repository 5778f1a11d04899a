"""What is wrong with data, in words that name the sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from falaj.training.runtime.errors import InvalidTraining, RaggedBatch, SampleUnreadable, TrainingFault

NO_MEMORY = (
    "can't allocate memory",
    "bad_alloc",
    "not enough memory",
    "unable to mmap",
    "unable to write to file </torch",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def unusable_data(where: str, given: object, allowed: str) -> InvalidTraining:
    return InvalidTraining("the data cannot be used", faults=[TrainingFault(where, given, allowed)])


def is_out_of_memory(failure: BaseException) -> bool:
    """On a GPU, and on a CPU, where torch has no type for it."""
    if isinstance(failure, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(failure) for words in NO_MEMORY)


def unreadable_sample(index: int, error: Exception, *, among: int = 1) -> SampleUnreadable:
    """The error of the dataset, with the sample that it failed at, or the first of those read together."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    faults = []
    if among > 1:
        faults.append(TrainingFault("data", f"the first of {among} samples that were read together"))
    if is_out_of_memory(error):
        fix = "fewer workers, a smaller prefetch, or a smaller batch_size"
        faults.append(TrainingFault("memory", "there is no more of it", fix=fix))
    return SampleUnreadable(reason, sample=index, faults=faults)


def ragged_batch(samples: list[Any], indices: list[int], reason: str) -> RaggedBatch:
    """The error that names the first sample that is unlike the first of its batch."""
    shapes = [_shape(sample) for sample in samples]
    odd = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is None:
        return RaggedBatch("the samples of a batch cannot be stacked", faults=[TrainingFault("data", reason)])
    given = f"sample {indices[odd]} is {shapes[odd]}, sample {indices[0]} is {shapes[0]}"
    fix = "pad or crop in the dataset's __getitem__"
    return RaggedBatch(
        "the samples of a batch differ",
        faults=[TrainingFault("data", given, "one shape for all samples", fix)],
    )


def _shape(sample: Any) -> str:
    if isinstance(sample, tuple | list):
        return f"({', '.join(_shape(part) for part in sample)})"
    if isinstance(sample, Mapping):
        return f"{{{', '.join(f'{name}: {_shape(part)}' for name, part in sample.items())}}}"
    shape = getattr(sample, "shape", None)
    return type(sample).__name__ if shape is None else str(list(shape))
