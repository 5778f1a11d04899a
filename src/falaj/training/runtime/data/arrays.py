"""NumPy arrays, and tuples and dicts of arrays, data frames and tensors, as tensors. NumPy is never imported here."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from falaj.training.runtime.data.errors import unusable_data

NUMBER_KINDS = "biuf"
"""The kinds of NumPy types that become tensors: booleans, integers and floats."""


def is_array(value: object) -> bool:
    """Return whether `value` is an array of NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_frame(value: object) -> bool:
    """Return whether `value` is a data frame: of pandas, of polars, or another with columns and an Arrow stream."""
    has_columns = hasattr(value, "columns") and not isinstance(value, type)
    return has_columns and (is_of(value, "pandas") or hasattr(value, "__arrow_c_stream__"))


def is_series(value: object) -> bool:
    """Return whether `value` is one column of a data frame of pandas or polars."""
    return (
        (is_of(value, "pandas") or is_of(value, "polars"))
        and hasattr(value, "to_frame")
        and not is_frame(value)
    )


def is_of(value: object, package: str) -> bool:
    """Return whether the class of `value`, or a base of it, is of `package`."""
    return any(each.__module__.partition(".")[0] == package for each in type(value).__mro__)


def to_columns(data: Any, *, where: str) -> Any:
    """Return a tensor, tuple or dict with arrays and frames as tensors; the last member of a tuple is the target."""
    if isinstance(data, tuple):
        last = len(data) - 1
        return tuple(
            to_tensor(each, where=f"{where}[{place}]", is_target=place == last > 0)
            for place, each in enumerate(data)
        )
    if isinstance(data, Mapping):
        return {name: to_tensor(each, where=f"{where}[{name!r}]") for name, each in data.items()}
    return to_tensor(data, where=where)


def to_tensor(value: Any, *, where: str, is_target: bool = False) -> Any:
    """Return an array, a frame or a series as a tensor; any other value as it is."""
    if is_array(value):
        return array_tensor(value, where=where, is_target=is_target)
    if is_frame(value) or is_series(value):
        from falaj.training.runtime.data.arrow.tables import frame_tensor, series_tensor

        return frame_tensor(value, where=where) if is_frame(value) else series_tensor(value, where=where)
    return value


def array_tensor(array: Any, *, where: str, is_target: bool = False) -> Tensor:
    """Return an array as a tensor, without a copy where its type allows it.

    float64 and booleans become float32, as in a table. A target of integers becomes int64: classes.
    """
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind not in NUMBER_KINDS or (kind == "f" and size > 8):
        raise unusable_data(where, f"an array of {array.dtype}", "numbers or booleans")
    if kind == "b" or (kind == "f" and size == 8):
        array = array.astype("float32")
    elif (is_target and kind in "iu") or (kind == "u" and size > 1):
        array = array.astype("int64")
    elif not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only memory, which is not written
        return torch.from_numpy(array)


def is_mapped(data: Any) -> bool:
    """Return whether an array of `data` is a memory-mapped file."""
    numpy = sys.modules.get("numpy")
    values = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else (data,)
    return numpy is not None and any(isinstance(each, numpy.memmap) for each in values)
