"""Errors of training data that name the sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from falaj.training.runtime.errors import InvalidTraining, RaggedBatch, SampleUnreadable, TrainingFault
from falaj.training.runtime.step.out_of_memory import is_out_of_memory


def unusable_data(where: str, given: object, allowed: str) -> InvalidTraining:
    return InvalidTraining("the data cannot be used", faults=[TrainingFault(where, given, allowed)])


def unreadable_sample(index: int, error: Exception, *, among: int = 1) -> SampleUnreadable:
    """Return the dataset's error with the sample that failed, or the first of those read together."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    faults = []
    if among > 1:
        faults.append(TrainingFault("data", f"the first of {among} samples that were read together"))
    if is_out_of_memory(error):
        fix = "fewer workers, a smaller prefetch, or a smaller batch_size"
        faults.append(TrainingFault("memory", "out of memory", fix=fix))
    return SampleUnreadable(reason, sample=index, faults=faults)


def ragged_batch(samples: list[Any], indices: list[int], reason: str) -> RaggedBatch:
    """Return the error that names the first sample whose shape differs from the first of its batch."""
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
