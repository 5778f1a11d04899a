"""Convert NumPy and Arrow columns to numbers or to category counts."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from falaj.errors import InvalidInput
from falaj.records.monitoring.sketches import CATEGORY_LENGTH, ColumnKind

Values: TypeAlias = npt.NDArray[Any] | pa.Array | pa.ChunkedArray
Floats = npt.NDArray[np.float64]

_UNREADABLE = (pa.ArrowException, TypeError, ValueError, OverflowError)


def kind_of(values: Values) -> ColumnKind:
    """Return the kind of a column: booleans and text are categorical, all else is numeric."""
    try:
        kind = _arrow(values).type
    except _UNREADABLE:
        return ColumnKind.NUMERIC
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return ColumnKind.CATEGORICAL if _is_text(kind) or pa.types.is_boolean(kind) else ColumnKind.NUMERIC


def numbers(values: Values, *, name: str) -> Floats:
    """Return the values as one-dimensional float64 with nulls as NaN. Times count in their own unit since 1970."""
    if isinstance(values, np.ndarray) and values.dtype == np.float64 and values.ndim == 1:
        return values
    if isinstance(values, np.ndarray) and values.dtype.kind in "fiub":
        return _flat(values, name).astype(np.float64, copy=False)
    try:
        return _numbers_of_arrow(_arrow(values))
    except _UNREADABLE:
        return _numbers_beyond_64_bits(values, name)


def category_counts(values: Values, *, name: str) -> tuple[dict[str, int], int]:
    """Return the count of each category as text, and the number of nulls."""
    try:
        if isinstance(values, np.ndarray):
            values = _flat(values, name)
        column = _arrow(values)
        if pa.types.is_floating(column.type):
            raise TypeError("floating-point numbers cannot be categories")
        if len(column) == 0:
            return {}, 0
        counted = pc.value_counts(column)
        labels, counts = counted.field("values"), counted.field("counts").to_pylist()
        texts = labels.cast(pa.large_string()).to_pylist()
    except _UNREADABLE:
        raise _unsupported(values, name, "text, booleans or integers") from None
    nulls = sum(count for text, count in zip(texts, counts, strict=True) if text is None)
    named: dict[str, int] = {}
    for text, count in zip(texts, counts, strict=True):
        if text is not None:
            named[text] = named.get(text, 0) + count
    return named, nulls


def category_hash(category: str) -> bytes:
    return blake2b(category.encode(), digest_size=8).digest()


def shortened(category: str) -> str:
    """Return `category`, or its beginning and a digest if it is too long."""
    if len(category) <= CATEGORY_LENGTH:
        return category
    digest = blake2b(category.encode(), digest_size=12).hexdigest()
    return f"{category[: CATEGORY_LENGTH - len(digest) - 1]}…{digest}"


def _flat(values: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    if values.ndim == 1 or values.size == max(values.shape, default=1):
        return values.reshape(-1)
    raise InvalidInput.at(name, given=f"an array of shape {values.shape}", allowed="one value per row")


def _arrow(values: Values) -> Any:
    if isinstance(values, np.ndarray):
        return pa.array(values, from_pandas=True)
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    raise TypeError(type(values).__name__)


def _numbers_of_arrow(column: Any) -> Floats:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if _is_text(kind):
        raise TypeError("text is not numeric")
    if pa.types.is_temporal(kind):
        column = column.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    column = column.cast(pa.float64(), safe=False)
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.float64)


def _numbers_beyond_64_bits(values: Values, name: str) -> Floats:
    """Convert Python integers beyond 64 bits to float64."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        try:
            if all(isinstance(value, int | float | None) for value in values):
                return _flat(values, name).astype(np.float64)
        except _UNREADABLE:
            pass
    raise _unsupported(values, name, "numbers or times") from None


def _is_text(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def _unsupported(values: Values, name: str, allowed: str) -> InvalidInput:
    given = getattr(values, "dtype", None) or getattr(values, "type", type(values).__name__)
    return InvalidInput.at(name, given=f"a column of {given}", allowed=allowed)
