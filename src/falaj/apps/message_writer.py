"""Prints what the processes of `falaj up` say. Where output is full, closed or not read, lines are lost, no more."""

from __future__ import annotations

import os
import queue
import select
from contextlib import suppress

from falaj.governance.operations.caller import start_thread

STDOUT, STDERR = 1, 2
MOST_WAITING = 1000
CHUNK_BYTES = 4096
PATIENCE_S = 1.0
"""How long a stream that takes nothing is waited for: one that does not block, and every stream at the end."""


class MessageWriter:
    """Writes to standard output and standard error in a thread. What cannot be written, or waits too long, is lost.

    `pipe` is a descriptor for the output of child processes, which never have to wait for a reader of theirs.
    """

    def __init__(self) -> None:
        self._waiting = queue.Queue[tuple[int, bytes] | None](MOST_WAITING)
        reading, self.pipe = os.pipe()
        self._writer = start_thread(self._write_all, name="messages")
        self._reader = start_thread(self._forward, reading, name="messages of children")

    def say(self, line: str) -> None:
        self._put(STDOUT, f"{line}\n".encode(errors="backslashreplace"))

    def warn(self, line: str) -> None:
        self._put(STDERR, f"warning: {line}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Write what the children have said and what waits, if that does not take long."""
        os.close(self.pipe)
        self._reader.join(PATIENCE_S)
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._writer.join(PATIENCE_S)

    def _put(self, stream: int, text: bytes) -> None:
        with suppress(queue.Full):
            self._waiting.put_nowait((stream, text))

    def _forward(self, reading: int) -> None:
        with open(reading, "rb", buffering=0) as pipe:
            while chunk := pipe.read(CHUNK_BYTES):
                self._put(STDERR, chunk)

    def _write_all(self) -> None:
        while (message := self._waiting.get()) is not None:
            with suppress(OSError):
                write(*message)


def write(stream: int, text: bytes) -> None:
    """Write all of `text`; BlockingIOError if a stream that does not block takes nothing for too long."""
    left = memoryview(text)
    while left:
        try:
            left = left[os.write(stream, left) :]
        except BlockingIOError:
            if not select.select([], [stream], [], PATIENCE_S)[1]:
                raise


def open_standard_streams() -> None:
    """Open the standard streams that are closed on the null device: else the next file would be taken for one."""
    for stream in (0, STDOUT, STDERR):
        try:
            os.fstat(stream)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != stream:
                os.dup2(opened, stream)
                os.close(opened)
