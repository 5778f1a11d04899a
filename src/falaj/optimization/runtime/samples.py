"""The sample of an export: rows as one array, and the names of its columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from falaj.errors import InvalidInput
from falaj.optimization.runtime.conversion.converted import Array

WHOLE = ("int64", "int32", "bool")


def rows_of(sample: Any, *, any_shape: bool) -> Array:
    """`sample` as float32 rows; whole numbers stay whole where `any_shape` is allowed, as torch may index by them."""
    if isinstance(sample, tuple | dict):
        raise InvalidInput.at(
            "sample",
            given=f"a {type(sample).__name__} of {len(sample)}",
            allowed="one array of rows",
            fix="let the model take one tensor [rows, features], and split it inside",
        )
    plain = sample.detach().cpu() if hasattr(sample, "detach") else sample
    try:
        array = np.asarray(plain)
        keep = any_shape and str(array.dtype) in WHOLE
        rows = array if keep else array.astype(np.float32)
    except (TypeError, ValueError) as error:
        fix = "encode text and categories as numbers before the model"
        raise InvalidInput.at("sample", given=str(error), allowed="numbers", fix=fix) from None
    if rows.ndim < 1 or len(rows) == 0 or (rows.ndim != 2 and not any_shape):
        raise InvalidInput.at(
            "sample", given=f"shape {list(rows.shape)}", allowed="[rows, features], one row at least"
        )
    return np.ascontiguousarray(rows)


def column_names(given: Sequence[str] | None, sample: Any, model: Any, rows: Array) -> tuple[str, ...]:
    """The names of the columns: as given, else of the sample, else of what the model was trained on, else none."""
    found = given
    if found is None and hasattr(sample, "columns"):
        found = [str(name) for name in sample.columns]
    if found is None:
        found = _trained_on(model)
    if found is None:
        return ()
    if rows.ndim != 2 or len(found) != rows.shape[1] or len(set(found)) != len(found):
        raise InvalidInput.at(
            "names",
            given=f"{len(found)} names, {len(set(found))} of them different",
            allowed=f"a name for each column of the sample, which has the shape {list(rows.shape)}",
        )
    return tuple(found)


def _trained_on(model: Any) -> list[str] | None:
    try:
        found = getattr(model, "feature_names_in_", None)
    except AttributeError:  # XGBoost says so of a model that was trained without names
        found = None
    if found is None:
        found = getattr(model, "feature_names", None)
    return None if found is None else [str(name) for name in found]
