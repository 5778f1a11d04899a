"""The classification extension: the highest values of an output with their places, as texts like `0.7:2`."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from falaj.apps.model_server.inference.json_values import encode_values
from falaj.records.serving.tensors import DYNAMIC, Datatype, Tensor

Array = npt.NDArray[Any]


def classify(array: Array, tensor: Tensor, classes: int) -> Array:
    """Return texts VALUE:INDEX of the `classes` highest values of each row, highest first; NaN comes last.

    An output whose first dimension is not that of rows is one row, and the result has no rows either.
    """
    has_rows = tensor.shape[:1] == (DYNAMIC,)
    rows = array.reshape((len(array), prod(array.shape[1:])) if has_rows else (1, array.size))
    most = min(classes, rows.shape[1])
    order = _highest(rows)[:, :most]
    values = np.take_along_axis(rows, order, axis=1)
    words = encode_values(values).decode()[1:-1].split(",") if values.size else []
    texts = [f"{word}:{place}" for word, place in zip(words, order.ravel().tolist(), strict=True)]
    found = np.array(texts, np.object_).reshape(order.shape)
    return found if has_rows else found[0]


def can_classify(tensor: Tensor) -> bool:
    return tensor.datatype is not Datatype.BYTES and bool(tensor.shape)


def _highest(rows: Array) -> Array:
    """Return the places of the values of each row, highest first; of equal ones the first comes first."""
    keys = np.where(np.isnan(rows), -np.inf, rows) if rows.dtype.kind == "f" else rows
    backwards = np.argsort(keys[:, ::-1], axis=1, kind="stable")[:, ::-1]
    found: Array = rows.shape[1] - 1 - backwards
    return found
