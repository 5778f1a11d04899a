"""Datatypes of the Open Inference Protocol as NumPy types and as bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from falaj.records.serving import Datatype

Array = npt.NDArray[Any]

NUMPY: dict[Datatype, np.dtype[Any]] = {
    Datatype.BOOL: np.dtype(np.bool_),
    Datatype.UINT8: np.dtype("<u1"),
    Datatype.UINT16: np.dtype("<u2"),
    Datatype.UINT32: np.dtype("<u4"),
    Datatype.UINT64: np.dtype("<u8"),
    Datatype.INT8: np.dtype("<i1"),
    Datatype.INT16: np.dtype("<i2"),
    Datatype.INT32: np.dtype("<i4"),
    Datatype.INT64: np.dtype("<i8"),
    Datatype.FP16: np.dtype("<f2"),
    Datatype.FP32: np.dtype("<f4"),
    Datatype.FP64: np.dtype("<f8"),
    Datatype.BYTES: np.dtype(np.object_),
}

PACKED = 4096
"""Up to this many values, struct is the fastest way to an array and checks the range (measured)."""

_LENGTH = struct.Struct("<I")


def from_bytes(data: memoryview, datatype: Datatype, count: int) -> Array:
    """Return `count` values from little-endian bytes. Raise ValueError if they do not match."""
    if datatype is Datatype.BYTES:
        return _texts_from_bytes(data, count)
    dtype = NUMPY[datatype]
    if len(data) != count * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes, where the shape needs {count * dtype.itemsize}")
    array = np.frombuffer(data, dtype)
    if datatype is Datatype.BOOL and (array.view(np.uint8) > 1).any():
        raise ValueError("bytes other than 0 and 1")
    return array if array.flags.aligned else array.copy()


def to_bytes(array: Array, datatype: Datatype) -> bytes:
    if datatype is Datatype.BYTES:
        return b"".join(_LENGTH.pack(len(text)) + text for text in _encoded(array))
    return np.ascontiguousarray(array, NUMPY[datatype]).tobytes()


def from_values(values: Sequence[Any], datatype: Datatype) -> Array:
    """Return a flat array of type-checked values. Raise OverflowError if a number is out of range."""
    if datatype is Datatype.FP32 and len(values) <= PACKED:
        return np.frombuffer(struct.pack(f"<{len(values)}f", *values), NUMPY[datatype])
    try:
        with np.errstate(over="raise"):
            return np.array(values, NUMPY[datatype])
    except FloatingPointError:
        raise OverflowError(f"a number that {datatype} cannot hold") from None


def _texts_from_bytes(data: memoryview, count: int) -> Array:
    """Parse texts that are prefixed with their length in four bytes."""
    texts: list[str] = []
    at = 0
    while at < len(data):
        if at + 4 > len(data):
            raise ValueError("a truncated length")
        (size,) = _LENGTH.unpack_from(data, at)
        at += 4 + size
        if at > len(data):
            raise ValueError(f"a truncated text of {size} bytes")
        texts.append(str(data[at - size : at], "utf-8"))
    if len(texts) != count:
        raise ValueError(f"{len(texts)} texts, where the shape needs {count}")
    return np.array(texts, np.object_)


def _encoded(array: Array) -> list[bytes]:
    values = array.ravel().tolist()
    return [value if isinstance(value, bytes) else str(value).encode() for value in values]
