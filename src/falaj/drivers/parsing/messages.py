"""Messages between the platform and a parser process: JSON objects and runs of bytes, each with its length."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!Q")
MESSAGE_LIMIT = 4 << 20
RANGE_LIMIT = 16 << 20
"""Bytes of a source that are asked for at once."""


class Broken(Exception):
    """The other side has gone, or does not keep to the protocol."""


def send_message(channel: socket.socket, message: dict[str, Any]) -> None:
    send_bytes(channel, json.dumps(message).encode())


def send_bytes(channel: socket.socket, content: Any) -> None:
    channel.sendall(LENGTH.pack(memoryview(content).nbytes))
    channel.sendall(content)


def receive_message(channel: socket.socket) -> dict[str, Any]:
    """Raise Broken at the end of the channel, or if that is no JSON object of a moderate size."""
    try:
        found = json.loads(receive_bytes(channel, limit=MESSAGE_LIMIT))
    except (ValueError, RecursionError) as error:
        raise Broken("not a message") from error
    if not isinstance(found, dict):
        raise Broken("not a message")
    return found


def receive_bytes(channel: socket.socket, *, limit: int) -> bytearray:
    (length,) = LENGTH.unpack(receive_exactly(channel, LENGTH.size))
    if length > limit:
        raise Broken(f"{length} bytes, where at most {limit} are allowed")
    return receive_exactly(channel, length)


def receive_into(channel: socket.socket, view: memoryview) -> None:
    """Receive bytes that fill `view`."""
    (length,) = LENGTH.unpack(receive_exactly(channel, LENGTH.size))
    if length != len(view):
        raise Broken(f"{length} bytes, where {len(view)} were asked for")
    _fill(channel, view)


def receive_exactly(channel: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    _fill(channel, memoryview(content))
    return content


def _fill(channel: socket.socket, view: memoryview) -> None:
    received = 0
    while received < len(view):
        count = channel.recv_into(view[received:])
        if count == 0:
            raise Broken("the channel has ended")
        received += count
