"""Receives a large body straight into the memory in which its tensors are read: one copy, and none by the parser."""

from __future__ import annotations

import asyncio
from typing import Protocol

import numpy as np

RECEIVED_APART_BYTES = 256 * 1024
"""A body of binary tensors of which so much is still to come is received here."""
AT_ONCE_BYTES = 1 << 20
"""Read before others get their turn."""
ALIGNED_BYTES = 64


class BodyReader(Protocol):
    """The connection whose request has a large body."""

    def body_arrived(self, size: int) -> bool:
        """Count bytes that have arrived; false if no more are wanted."""

    def body_complete(self, body: memoryview) -> None:
        """Go on with the request."""

    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def eof_received(self) -> bool: ...
    def connection_lost(self, exc: Exception | None) -> None: ...


class LargeBody(asyncio.BufferedProtocol):
    """Takes the place of a connection's protocol until the body is complete."""

    def __init__(self, reader: BodyReader, start: bytes, size: int, *, tensors_at: int) -> None:
        """`start` has arrived before, of `size` bytes in all. The tensors begin at a multiple of ALIGNED_BYTES."""
        self._reader = reader
        memory = np.empty(size + ALIGNED_BYTES, np.uint8)
        first = -(memory.ctypes.data + tensors_at) % ALIGNED_BYTES
        self._body = memory[first : first + size].data
        self._body[: len(start)] = start
        self._at = len(start)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._body[self._at : self._at + AT_ONCE_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        if self._reader.body_arrived(nbytes) and self._at == len(self._body):
            self._reader.body_complete(self._body)

    def pause_writing(self) -> None:
        self._reader.pause_writing()

    def resume_writing(self) -> None:
        self._reader.resume_writing()

    def eof_received(self) -> bool:
        return self._reader.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reader.connection_lost(exc)
