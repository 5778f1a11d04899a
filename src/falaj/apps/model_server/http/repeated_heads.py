"""Request heads that a connection has accepted before: the same bytes need not be parsed a second time.

A client sends the same head with every request of a connection, but for the number in Content-Length. A head is kept
once it has passed every check, cut at that number. A request whose bytes are the same around another number means the
same, so it gets the same headers; its size, its token and all limits are checked as for any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

CONTENT_LENGTH = re.compile(rb"\r\n(?i:content-length):[ \t]*([0-9]+)\r\n")
MAX_DIGITS = 9
"""Digits of a length; what is longer goes to the parser, which knows what to refuse."""
MAX_HEAD_BYTES = 4096
"""Larger heads are not kept: each connection may have one."""
KNOWN_SIZES = 64
"""Sizes of requests for which the whole head is kept, with the number in it."""
NEVER_KEPT = frozenset((b"transfer-encoding", b"expect", b"content-encoding", b"falaj-secret"))
"""Headers that change how the body is read or who is asked; their requests go to the parser."""


class RepeatedRequest:
    """A request that differs from an earlier one of its connection in values alone, until it is answered.

    In the queue of its connection it stands for an exchange. It lives for one turn of the event loop, which is why it
    is not counted among the bytes that its caller holds.
    """

    __slots__ = ("body", "cancelled", "head", "response", "values", "writer")
    closes = wants_continue = False
    is_authenticated = True
    holder, size = "", 0

    def __init__(self, writer: RequestWriter, head: RepeatedHead, body: bytes, values: bytes) -> None:
        self.writer = writer
        self.head = head
        self.body = body
        self.values = values
        self.response: bytes | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """Mark the request as cancelled: the client no longer waits."""
        self.cancelled = True

    def to_bytes(self, *, closes: bool) -> bytes:
        response = self.response or b""
        return response.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1) if closes else response


class RequestWriter(Protocol):
    """The connection of repeated requests."""

    def answer(self, request: RepeatedRequest, response: bytes) -> None:
        """Write a response after all earlier ones."""

    def as_exchange(self, request: RepeatedRequest) -> Any:
        """Put an exchange in the place of a request, and return it; None if the request was refused."""


class KeptBody(Protocol):
    """The part of a body that other requests have too."""

    def repeat(self, writer: RequestWriter, head: RepeatedHead, body: bytes) -> RepeatedRequest | None:
        """Return a request that is answered together with others at the end of the turn; None if it is not."""


@dataclass(slots=True)
class RepeatedHead:
    """An accepted head around the number of its Content-Length, and what it says."""

    start: bytes
    end: bytes
    method: bytes
    path: bytes
    headers: Mapping[bytes, bytes]
    credential: str
    kept: KeptBody | None = None
    """What the reader of the last body keeps of it, for the next request with this head. Threads replace it."""
    known: dict[int, bytes] = field(default_factory=dict)
    """Whole heads by the size of their requests."""

    def body_of(self, data: bytes) -> bytes | None:
        """Return the body if `data` is exactly one request with this head."""
        head = self.known.get(len(data))
        if head is not None and data.startswith(head):
            return data[len(head) :]
        start = len(self.start)
        if not data.startswith(self.start):
            return None
        stop = data.find(self.end, start, start + MAX_DIGITS + len(self.end))
        if stop < 0:
            return None
        digits = data[start:stop]
        at = stop + len(self.end)
        if not digits.isdigit() or int(digits) != len(data) - at:
            return None
        if len(self.known) < KNOWN_SIZES:
            self.known[len(data)] = data[:at]
        return data[at:]


def kept_head(
    data: bytes, method: bytes, target: bytes, path: bytes, headers: Mapping[bytes, bytes], credential: str
) -> RepeatedHead | None:
    """Return the head of `data`, one request that was accepted; None if it is not to be kept.

    `target` is the path as the request line has it. The size of the body proves where the parser saw the end of the
    head: a head that ends in another way than by an empty line has another size.
    """
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
    if (
        end < 4
        or headers.keys() & NEVER_KEPT
        or not data.startswith(b"%b %b HTTP/1.1\r\n" % (method, target))
    ):
        return None
    found = CONTENT_LENGTH.findall(data, 0, end)
    place = CONTENT_LENGTH.search(data, 0, end)
    if place is None or len(found) != 1 or int(found[0]) != len(data) - end or len(found[0]) > MAX_DIGITS:
        return None
    head = data[:end]
    return RepeatedHead(head[: place.start(1)], head[place.end(1) :], method, path, headers, credential)
