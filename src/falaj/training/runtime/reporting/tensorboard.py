"""Metrics as TensorBoard event files, written with the standard library alone.

A file is a sequence of records: the length (8 bytes, little-endian), its checksum, the bytes of an Event message, and
their checksum. Each call of `fit` writes a file of its own, which starts with the step that it resumes from:
TensorBoard then discards what earlier files hold for that step and later ones.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from falaj.training.runtime.agent.agents import MetricValue

FLUSH_EVERY_S = 1.0
CASTAGNOLI = 0x82F63B78
MASK = 0xA282EAD8
SESSION_STARTS = 1
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf."""


class EventFile:
    """A new event file in `folder`, for the steps after `done`."""

    def __init__(self, folder: str | Path, *, done: int = 0) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        seconds, parts = divmod(time.time_ns(), 1_000_000_000)
        # Readers take the files in the order of their names: the time comes first.
        name = f"events.out.tfevents.{seconds:010}.{parts:09}.{socket.gethostname()}.{os.getpid()}"
        self.path = path / name
        self._file = self.path.open("xb")
        self._flushed_at = time.monotonic()
        self._write(message_of_version(time.time()))
        self._write(message_of_start(time.time(), step=done + 1))
        self._file.flush()

    def add(self, metrics: Sequence[MetricValue]) -> None:
        """Write `metrics`; the file is flushed about once a second."""
        now = time.time()
        for metric in metrics:
            self._write(message_of_metric(now, metric))
        if time.monotonic() - self._flushed_at >= FLUSH_EVERY_S:
            self._flushed_at = time.monotonic()
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, message: bytes) -> None:
        self._file.write(framed(message))


def message_of_version(now: float) -> bytes:
    """Return the first Event of a file."""
    return double(1, now) + text(3, "brain.Event:2")


def message_of_start(now: float, *, step: int) -> bytes:
    """Return the Event that discards `step` and later ones in earlier files."""
    return double(1, now) + number(2, step) + nested(7, number(1, SESSION_STARTS))


def message_of_metric(now: float, metric: MetricValue) -> bytes:
    value = text(1, metric.name) + single(2, metric.value)
    return double(1, now) + number(2, metric.step) + nested(5, nested(1, value))


def number(field: int, value: int) -> bytes:
    return varint(field << 3 | VARINT) + varint(value)


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | FIXED64) + struct.pack("<d", value)


def single(field: int, value: float) -> bytes:
    """Encode a 32-bit float; larger values become infinite."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return varint(field << 3 | FIXED32) + packed


def text(field: int, value: str) -> bytes:
    return nested(field, value.encode())


def nested(field: int, value: bytes) -> bytes:
    return varint(field << 3 | BYTES) + varint(len(value)) + value


def varint(value: int) -> bytes:
    """Encode a protobuf varint: seven bits per byte, lowest first; the high bit marks continuation."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def framed(message: bytes) -> bytes:
    """Return `message` as a record."""
    length = struct.pack("<Q", len(message))
    return b"".join((length, checksum(length), message, checksum(message)))


def checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C of a record."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (CASTAGNOLI if byte & 1 else 0)
        found.append(byte)
    return tuple(found)


TABLE = _table()
