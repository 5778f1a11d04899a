"""Messages between the model server and a worker process: length-prefixed MessagePack over a socket pair.

The bytes of arrays follow the message that describes them, so that large ones are copied no more than the kernel does.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from falaj.errors import FalajError

Array = npt.NDArray[Any]
M = TypeVar("M")

_LENGTH = struct.Struct("<Q")
MAX_MESSAGE_BYTES = 2**32
"""Larger than any model."""
MAX_REPLY_BYTES = 2**27
"""The worker is not trusted with more, beside the bytes of its outputs."""
LONGEST_MESSAGE = 4000
MOST_FAULTS = 20
JOINED_BYTES = 2**16
"""A message and arrays up to this size are sent in one piece."""
NUMBERS = "biuf"
"""The kinds of dtypes that travel as bytes."""


class WireArray(msgspec.Struct, array_like=True, gc=False):
    """The dtype and shape of an array whose bytes follow the message; texts, and bytes that are none, are in it."""

    dtype: str
    shape: tuple[int, ...]
    texts: list[Any] | None = None


class LoadRequest(msgspec.Struct):
    """The model that the worker serves, as the JSON of a ServedFile, its bytes, and the other files of the version."""

    file: bytes
    content: bytes
    others: dict[str, bytes] = {}


class Loaded(msgspec.Struct):
    """The signature of a loaded model as JSON, and the cost of its runs."""

    model: bytes
    seconds: float
    rows: int
    more_seconds: float


class RunRequest(msgspec.Struct):
    inputs: list[WireArray]
    limit_s: float


class Outputs(msgspec.Struct):
    arrays: list[WireArray]


class Failed(msgspec.Struct, tag=True):
    """An error by its code, message and faults."""

    code: str
    message: str
    faults: list[dict[str, str | None]] = []


class Succeeded(msgspec.Struct, tag=True):
    """The encoded message that was asked for."""

    message: bytes


_reply = msgspec.msgpack.Decoder(Failed | Succeeded)


def send(connection: socket.socket, message: msgspec.Struct, raw: Sequence[memoryview] = ()) -> None:
    """Send a message, and after it the bytes of its arrays."""
    body = msgspec.msgpack.encode(message)
    length = _LENGTH.pack(len(body))
    if len(body) + sum(part.nbytes for part in raw) <= JOINED_BYTES:
        connection.sendall(b"".join([length, body, *raw]))
        return
    connection.sendall(length + body)
    for part in raw:
        connection.sendall(part)


def reply(connection: socket.socket, message: msgspec.Struct, raw: Sequence[memoryview] = ()) -> None:
    send(connection, Succeeded(msgspec.msgpack.encode(message)), raw)


def reply_error(connection: socket.socket, error: Exception) -> None:
    if not isinstance(error, FalajError):
        send(connection, Failed("", str(error)[:LONGEST_MESSAGE]))
        return
    faults = [fault.model_dump() for fault in error.faults[:MOST_FAULTS]]
    send(connection, Failed(error.code, error.message[:LONGEST_MESSAGE], faults))


def receive(connection: socket.socket, kind: type[M]) -> M:
    """Return the next message. Raise EOFError if the other side is gone, ValueError if it is none."""
    return msgspec.msgpack.decode(_body(connection), type=kind)


def receive_reply(connection: socket.socket, kind: type[M]) -> M | Failed:
    found = _reply.decode(_body(connection, MAX_REPLY_BYTES))
    return found if isinstance(found, Failed) else msgspec.msgpack.decode(found.message, type=kind)


def wire(arrays: Sequence[Array]) -> tuple[list[WireArray], list[memoryview]]:
    """Return what describes the arrays, and the bytes of those that are numbers."""
    described, raw = [], []
    for array in arrays:
        if array.dtype.kind in "OUS":
            texts = [_text(value) for value in array.ravel().tolist()]
            described.append(WireArray("", array.shape, texts))
        else:
            described.append(WireArray(array.dtype.str, array.shape))
            raw.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return described, raw


def receive_arrays(
    connection: socket.socket, described: Sequence[WireArray], *, limit_bytes: int = MAX_MESSAGE_BYTES
) -> list[Array]:
    """Return the arrays whose bytes follow. Raise ValueError if they are no arrays, or too large together."""
    if sum(_size(each) for each in described) > limit_bytes:
        raise ValueError(f"arrays of more than {limit_bytes} bytes")
    return [
        _texts(each.texts).reshape(each.shape) if each.texts is not None else _numbers(connection, each)
        for each in described
    ]


def _size(described: WireArray) -> int:
    if described.texts is not None:
        return 0
    dtype = np.dtype(described.dtype)
    if dtype.kind not in NUMBERS or min(described.shape, default=0) < 0:
        raise ValueError(f"an array of {described.dtype} {described.shape}")
    return dtype.itemsize * prod(described.shape)


def _numbers(connection: socket.socket, described: WireArray) -> Array:
    content = np.empty(_size(described), np.uint8)
    _fill(connection, content.data)
    return content.view(described.dtype).reshape(described.shape)


def _texts(values: list[Any]) -> Array:
    if not all(isinstance(value, str | bytes) for value in values):
        raise ValueError("a list of other things than texts and bytes")
    found = np.empty(len(values), np.object_)
    found[:] = values
    return found


def _text(value: object) -> str | bytes:
    return value if isinstance(value, bytes) else str(value)


def _body(connection: socket.socket, limit_bytes: int = MAX_MESSAGE_BYTES) -> bytearray:
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if size > limit_bytes:
        raise ValueError(f"a message of {size} bytes")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return data


def _fill(connection: socket.socket, left: memoryview) -> None:
    while left:
        taken = connection.recv_into(left)
        if not taken:
            raise EOFError
        left = left[taken:]
