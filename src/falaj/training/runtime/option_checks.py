"""Checks of single option values, for the error that lists everything that is wrong with a call of `fit`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from falaj.training.runtime.errors import TrainingFault
from falaj.training.runtime.parallel.layout import AXES


def whole_number_faults(name: str, value: object, *, at_least: int = 1) -> list[TrainingFault]:
    """Return a fault unless `value` is an int of at least `at_least`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
        return []
    return [TrainingFault(name, value, f"a whole number, at least {at_least}")]


def positive_faults(name: str, value: object) -> list[TrainingFault]:
    """Return a fault unless `value` is a finite number above 0."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return []
    return [TrainingFault(name, value, "a number above 0")]


def flag_faults(name: str, value: object) -> list[TrainingFault]:
    """Return a fault unless `value` is a bool."""
    return [] if isinstance(value, bool) else [TrainingFault(name, value, "True, False")]


def are_names(value: object) -> bool:
    """Return whether `value` is a sequence of strings."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and all(isinstance(each, str) for each in value)
    )


def is_tensor_plan(value: object) -> bool:
    """Return whether `value` maps names of layers to "column" or "row"."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and is_one_of(cut, ("column", "row")) for name, cut in value.items()
    )


def is_one_of(value: object, words: Sequence[str]) -> bool:
    """Return whether `value` is one of `words`; a value of another type is not."""
    return isinstance(value, str) and value in words


def device_faults(name: object) -> list[TrainingFault]:
    """Return the faults of a device name, whether or not the device exists."""
    try:
        if isinstance(name, str) and (name == "auto" or torch.device(name)):
            return []
    except RuntimeError:
        pass
    return [TrainingFault("device", name, "auto, cpu, cuda, or a device of this machine")]


def parallel_faults(parallel: object) -> list[TrainingFault]:
    """Return the faults of the option `parallel` that do not depend on the number of processes."""
    if isinstance(parallel, str) and parallel in ("auto", *AXES):
        return []
    if isinstance(parallel, Mapping) and parallel and all(is_one_of(name, AXES) for name in parallel):
        return [
            fault
            for name, count in parallel.items()
            for fault in whole_number_faults(f"parallel[{name!r}]", count)
        ]
    return [TrainingFault("parallel", parallel, f"auto, {', '.join(AXES)}, or their counts")]
