"""Frames of HTTP/2 (RFC 9113): their numbers, their bytes, and the faults that end a connection."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
FRAME_BYTES = 9
DEFAULT_WINDOW, MAX_WINDOW = 65_535, 2**31 - 1
DEFAULT_FRAME, MAX_FRAME = 16_384, 2**24 - 1

FRAME = Struct(">HBBBL")
"""Length in two parts, type, flags and stream."""
WORD = Struct(">L")
SETTING = Struct(">HL")


class ErrorCode(IntEnum):
    """Reasons to end a stream or a connection (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ConnectionFault(Exception):
    """The client broke a rule of HTTP/2 in a way that ends the connection."""

    def __init__(self, code: ErrorCode, words: str) -> None:
        super().__init__(words)
        self.code = code
        self.words = words


def frame_start(kind: int, flags: int, size: int) -> bytes:
    """Return the first bytes of a frame, up to the number of its stream."""
    return FRAME.pack(size >> 8, size & 255, kind, flags, 0)[:5]


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Return a frame."""
    size = len(body)
    return FRAME.pack(size >> 8, size & 255, kind, flags, stream) + body


def without_padding(body: bytes) -> bytes:
    if not body or body[0] >= len(body):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding exceeds its frame")
    return body[1 : len(body) - body[0]]


def require_size(name: str, body: bytes, size: int) -> None:
    if len(body) != size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"{name} has {len(body)} bytes, allowed {size}")
