"""Serve a model whose number of rows is fixed for any number: in parts of that size, the last one padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from falaj.records.serving.tensors import DYNAMIC, Datatype, Tensor
from falaj.serving.runtime.engines.opened import OpenedModel, Run
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]

LARGEST = 4096
"""A first dimension beyond this is hardly a batch."""


def any_rows(opened: OpenedModel) -> OpenedModel:
    """Return `opened` for any number of rows, if its fixed first dimension is a batch; else as it is.

    It is one if all inputs and outputs have it, and if the answer to a row does not depend on the rows beside it. A
    model that is not padded takes exactly the rows that it declares; a request with others is refused.
    """
    sizes = {tensor.shape[:1] for tensor in (*opened.inputs, *opened.outputs)}
    if len(sizes) != 1 or not (size := sizes.pop()) or not 1 <= size[0] <= LARGEST:
        return opened
    rows = size[0]
    if any(DYNAMIC in tensor.shape or tensor.datatype is Datatype.BYTES for tensor in opened.inputs):
        return opened
    if rows > 1 and not _rows_are_independent(opened, rows):
        return opened
    return OpenedModel(
        opened.platform,
        tuple(_with_any_rows(tensor) for tensor in opened.inputs),
        tuple(_with_any_rows(tensor) for tensor in opened.outputs),
        _padded(opened.run, rows),
    )


def _padded(run: Run, size: int) -> Run:
    def run_padded(inputs: Sequence[Array]) -> list[Array]:
        rows = len(inputs[0])
        if any(len(array) != rows for array in inputs):
            raise ValueError("the inputs have different numbers of rows")
        parts = []
        for start in range(0, rows, size):
            taken = [array[start : start + size] for array in inputs]
            parts.append([array[: rows - start] for array in run([_fill(array, size) for array in taken])])
        return [np.concatenate(found) for found in zip(*parts, strict=True)]

    return run_padded


def _fill(array: Array, size: int) -> Array:
    """Return the rows, and copies of the last one: they are values that the model takes."""
    missing = size - len(array)
    return array if not missing else np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])


def _rows_are_independent(opened: OpenedModel, rows: int) -> bool:
    random = np.random.default_rng(11)
    inputs = [_values(tensor, random) for tensor in opened.inputs]
    try:
        together = opened.run(inputs)
        alone = opened.run([_fill(array[:1], rows) for array in inputs])
    except Exception:  # a framework may raise anything on synthetic values
        return False
    pairs = zip(alone, together, strict=True)
    return all(
        np.allclose(one[:1], all_rows[:1], rtol=1e-3, atol=1e-5, equal_nan=True) for one, all_rows in pairs
    )


def _values(tensor: Tensor, random: np.random.Generator) -> Array:
    drawn = random.random(tensor.shape)
    is_float = tensor.datatype in (Datatype.FP16, Datatype.BF16, Datatype.FP32, Datatype.FP64)
    return (drawn if is_float else drawn > 0.5).astype(NUMPY[tensor.datatype])


def _with_any_rows(tensor: Tensor) -> Tensor:
    return tensor.model_copy(update={"shape": (DYNAMIC, *tensor.shape[1:])})
