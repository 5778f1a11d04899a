"""Datatypes of the Open Inference Protocol as NumPy types and as bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from falaj.records.serving.tensors import Datatype

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
    Datatype.BF16: np.dtype("<f4"),
    Datatype.FP32: np.dtype("<f4"),
    Datatype.FP64: np.dtype("<f8"),
    Datatype.BYTES: np.dtype(np.object_),
}
"""The types of arrays. NumPy has no bfloat16: its values are float32 that have no more bits than fit."""

PACKED = 4096
"""Up to this many values, struct is the fastest way to an array and checks the range (measured)."""

_LENGTH = struct.Struct("<I")


def from_bytes(data: memoryview, datatype: Datatype, count: int) -> Array:
    """Return `count` values from little-endian bytes. Raise ValueError if they do not match."""
    if datatype is Datatype.BYTES:
        return _texts_from_bytes(data, count)
    if datatype is Datatype.BF16:
        return from_bfloat16_bits(from_bytes(data, Datatype.UINT16, count))
    dtype = NUMPY[datatype]
    if len(data) != count * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes, where the shape needs {count * dtype.itemsize}")
    if not count:
        return np.empty(0, dtype)
    array = np.frombuffer(data, dtype)
    if datatype is Datatype.BOOL and (array.view(np.uint8) > 1).any():
        raise ValueError("bytes other than 0 and 1")
    return array if array.flags.aligned else array.copy()


def to_bytes(array: Array, datatype: Datatype) -> bytes:
    if datatype is Datatype.BYTES:
        return b"".join(_LENGTH.pack(len(text)) + text for text in _encoded(array))
    if datatype is Datatype.BF16:
        return bfloat16_bits(array).tobytes()
    return np.ascontiguousarray(array, NUMPY[datatype]).tobytes()


def bfloat16_bits(array: Array) -> npt.NDArray[np.uint16]:
    """Return float32 values as the bits of the nearest bfloat16, halfway cases to the even one."""
    bits = np.ascontiguousarray(array, "<f4").view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), (bits >> 16) | 0x40, rounded).astype("<u2")


def from_bfloat16_bits(bits: npt.NDArray[Any]) -> Array:
    """Return the float32 values of bfloat16 bits."""
    return (bits.astype("<u4") << 16).view("<f4")


def from_values(values: Sequence[Any], datatype: Datatype) -> Array:
    """Return a flat array of type-checked values. Raise OverflowError if a number is out of range."""
    if datatype is Datatype.FP32 and len(values) <= PACKED:
        return np.frombuffer(struct.pack(f"<{len(values)}f", *values), NUMPY[datatype])
    try:
        with np.errstate(over="raise"):
            array = np.array(values, NUMPY[datatype])
            return from_bfloat16_bits(bfloat16_bits(array)) if datatype is Datatype.BF16 else array
    except FloatingPointError:
        raise OverflowError(f"a number that {datatype} cannot hold") from None


def _texts_from_bytes(data: memoryview, count: int) -> Array:
    """Parse texts that are prefixed with their length in four bytes; bytes that are not UTF-8 stay bytes."""
    texts: list[str | bytes] = []
    at = 0
    while at < len(data):
        if at + 4 > len(data):
            raise ValueError("a truncated length")
        (size,) = _LENGTH.unpack_from(data, at)
        at += 4 + size
        if at > len(data):
            raise ValueError(f"a truncated text of {size} bytes")
        texts.append(_text(bytes(data[at - size : at])))
    if len(texts) != count:
        raise ValueError(f"{len(texts)} texts, where the shape needs {count}")
    return np.array(texts, np.object_)


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _encoded(array: Array) -> list[bytes]:
    values = array.ravel().tolist()
    return [value if isinstance(value, bytes) else str(value).encode() for value in values]
