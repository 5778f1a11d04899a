"""Messages between the model server and a worker process: length-prefixed MessagePack over a socket pair."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from falaj.errors import FalajError

Array = npt.NDArray[Any]
M = TypeVar("M")

_LENGTH = struct.Struct("<Q")
MAX_MESSAGE_BYTES = 2**32
"""Larger than any model; the worker is not trusted with more."""


class WireArray(msgspec.Struct, array_like=True, gc=False):
    """An array: its dtype, shape, and bytes; texts, and bytes that are none, are a list instead, under the dtype ""."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | list[Any]


class LoadRequest(msgspec.Struct):
    """The model that the worker serves, as the JSON of a ServedFile, and its bytes."""

    file: bytes
    content: bytes


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
    """An error by its code and message."""

    code: str
    message: str


class Succeeded(msgspec.Struct, tag=True):
    """The encoded message that was asked for."""

    message: bytes


_reply = msgspec.msgpack.Decoder(Failed | Succeeded)


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)))
    connection.sendall(body)


def reply(connection: socket.socket, message: msgspec.Struct) -> None:
    send(connection, Succeeded(msgspec.msgpack.encode(message)))


def reply_error(connection: socket.socket, error: Exception) -> None:
    code = error.code if isinstance(error, FalajError) else ""
    message = error.message if isinstance(error, FalajError) else str(error)
    send(connection, Failed(code, message[:4000]))


def receive(connection: socket.socket, kind: type[M]) -> M:
    """Return the next message. Raise EOFError if the other side is gone, ValueError if it is none."""
    return msgspec.msgpack.decode(_body(connection), type=kind)


def receive_reply(connection: socket.socket, kind: type[M]) -> M | Failed:
    found = _reply.decode(_body(connection))
    return found if isinstance(found, Failed) else msgspec.msgpack.decode(found.message, type=kind)


def wire(arrays: Sequence[Array]) -> list[WireArray]:
    return [
        WireArray("", array.shape, [_text(value) for value in array.ravel().tolist()])
        if array.dtype.kind in "OUS"
        else WireArray(array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes())
        for array in arrays
    ]


def arrays_of(wired: Sequence[WireArray]) -> list[Array]:
    """Return the arrays. Raise ValueError if bytes and shape do not match."""
    return [
        _texts(each.data).reshape(each.shape)
        if isinstance(each.data, list)
        else np.frombuffer(each.data, np.dtype(each.dtype)).reshape(each.shape)
        for each in wired
    ]


def _texts(values: list[Any]) -> Array:
    if not all(isinstance(value, str | bytes) for value in values):
        raise ValueError("a list of other things than texts and bytes")
    found = np.empty(len(values), np.object_)
    found[:] = values
    return found


def _text(value: object) -> str | bytes:
    return value if isinstance(value, bytes) else str(value)


def _body(connection: socket.socket) -> bytearray:
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 2**20))
        if not part:
            raise EOFError
        data += part
    return data
