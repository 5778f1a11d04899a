"""Header blocks of gRPC over HTTP/2: requests decoded once per block, responses encoded without a table."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING
from urllib.parse import quote

import hpack

MAX_TOKEN_BYTES = 8192
CACHED_BLOCKS = 64
"""Header blocks of one connection whose meaning is remembered while the dynamic table stays as it is."""
CACHED_BLOCK_BYTES = 4096
MAX_MESSAGE_CHARACTERS = 2000
"""Longest error message in a trailer; many clients accept 8 KiB of trailers in all."""

GRPC_TYPES = (b"application/grpc", b"application/grpc+proto")
NOT_OF_HTTP2 = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UPPER = re.compile(rb"[A-Z\x00-\x20\x7f-\xff]")
_CONTROL = re.compile(rb"[\x00\r\n]")

if TYPE_CHECKING:
    from falaj.apps.model_server.grpc.tensors import MessageTemplate

KEPT = frozenset((b"falaj-version", b"falaj-key", b"traceparent", b"tracestate"))
"""Metadata that the prediction asks for."""
ONCE = KEPT | {b"authorization"}
Fields = Iterable[tuple[bytes, bytes]]


class NoRequest(Enum):
    """What a header block is that is not the head of a request."""

    TRAILERS = "fields that a request may end with"
    MALFORMED = "fields that HTTP/2 does not allow"


class RequestHead:
    """What a header block says about a request."""

    __slots__ = (
        *("accepts_gzip", "credential", "encoding", "kept", "path", "status", "template", "timeout_s"),
        "given_twice",
    )

    def __init__(self, fields: Fields) -> None:
        """Raise ValueError if the fields are not those of a request of HTTP/2."""
        known = _pseudo_fields(fields)
        if not known.keys() >= {b":method", b":scheme", b":path"} or not known[b":path"]:
            raise ValueError("a missing pseudo-header field")
        self.path = known[b":path"]
        self.status = 200 if known[b":method"] == b"POST" else 405
        """The HTTP status of a request that is not one of gRPC, else 200."""
        self.credential: str | None = None
        self.given_twice = _given_twice(fields)
        """The metadata that is to be given once, and is not."""
        self.timeout_s: float | None = None
        self.encoding = b"identity"
        self.accepts_gzip = False
        self.kept = {name: value for name, value in fields if name in KEPT}
        self.template: MessageTemplate | None = None
        """The message that came with this head before, if clients may repeat it."""
        kind = b""
        for name, value in fields:
            if name == b"authorization":
                self.credential = _bearer(value)
            elif name == b"content-type":
                kind = value
            elif name == b"grpc-timeout":
                self.timeout_s = _timeout(value)
            elif name == b"grpc-encoding":
                self.encoding = value
            elif name == b"grpc-accept-encoding":
                self.accepts_gzip = b"gzip" in value.replace(b" ", b"").split(b",")
        if self.status == 200 and kind.partition(b";")[0].strip() not in GRPC_TYPES:
            self.status = 415


class HeaderReader:
    """Decodes the header blocks of one connection.

    A block that does not change the dynamic table means the same as long as no other block changes it. Clients repeat
    theirs byte by byte, so most blocks are looked up.
    """

    def __init__(self, limit: int) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=limit)
        self._table = self._decoder.header_table
        self.known: dict[bytes, RequestHead | NoRequest] = {}
        """What blocks mean while the dynamic table stays as it is."""

    def read(self, block: bytes) -> RequestHead | NoRequest:
        """Return the head of a request, or what a block is instead. Raise HPACKError if it cannot be decoded."""
        try:
            return self.known[block]
        except KeyError:
            return self._decode(block)

    def _decode(self, block: bytes) -> RequestHead | NoRequest:
        entries = self._table.dynamic_entries
        before = (entries[0] if entries else None, len(entries), self._table.maxsize)
        fields = list(self._decoder.decode(block, raw=True))
        after = (entries[0] if entries else None, len(entries), self._table.maxsize)
        head = _head_of(fields)
        if before[0] is not after[0] or before[1:] != after[1:]:  # a new entry is a new object
            self.known.clear()
        elif len(block) <= CACHED_BLOCK_BYTES:
            if len(self.known) >= CACHED_BLOCKS:
                self.known.clear()
            self.known[block] = head
        return head


def _head_of(fields: Fields) -> RequestHead | NoRequest:
    try:
        if _pseudo_fields(fields):
            return RequestHead(fields)
    except ValueError:
        return NoRequest.MALFORMED
    return NoRequest.TRAILERS


def literal(name: bytes, value: bytes) -> bytes:
    """Return a field of a header block that changes no table."""
    return b"\x00" + _length(name) + name + _length(value) + value


def trailers(status: int, message: str = "", *, retry_after_s: float | None = None) -> bytes:
    """Return the header block that ends a response."""
    block = literal(b"grpc-status", b"%d" % status)
    if message:
        text = message[:MAX_MESSAGE_CHARACTERS]
        safe = quote(text, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~", errors="replace")
        block += literal(b"grpc-message", safe.encode("ascii"))
    if retry_after_s is not None:
        block += literal(b"grpc-retry-pushback-ms", b"%d" % (1000 * retry_after_s))
    return block


def refusal(status: int, message: str, *, retry_after_s: float | None = None) -> bytes:
    """Return the header block of a response that is nothing but a status."""
    return RESPONSE + trailers(status, message, retry_after_s=retry_after_s)


def plain_response(status: int) -> bytes:
    """Return the header block of an answer to a request that is not one of gRPC."""
    return literal(b":status", b"%d" % status) + literal(b"content-length", b"0")


def _length(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes((size,))
    size -= 127
    coded = bytearray((127,))
    while size >= 128:
        coded.append(size & 127 | 128)
        size >>= 7
    coded.append(size)
    return bytes(coded)


def _pseudo_fields(fields: Fields) -> dict[bytes, bytes]:
    """Return the pseudo-header fields. Raise ValueError if the fields break a rule of HTTP/2."""
    known: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if _CONTROL.search(value) or value[:1] in (b" ", b"\t") or value[-1:] in (b" ", b"\t"):
            raise ValueError("a control character")
        if name[:1] == b":":
            if regular or name not in PSEUDO or name in known:
                raise ValueError("an unknown, late or repeated pseudo-header field")
            known[name] = value
            continue
        regular = True
        if not name or _UPPER.search(name) or b":" in name or name in NOT_OF_HTTP2:
            raise ValueError("a name that HTTP/2 does not have")
        if name == b"te" and value != b"trailers":
            raise ValueError("te allows trailers only")
    return known


def _given_twice(fields: Fields) -> bytes | None:
    seen: set[bytes] = set()
    for name, _ in fields:
        if name in ONCE and name in seen:
            return name
        seen.add(name)
    return None


def _bearer(value: bytes) -> str | None:
    if len(value) > MAX_TOKEN_BYTES or value[:7].lower() != b"bearer ":
        return None
    return value[7:].strip().decode("latin-1") or None


def _timeout(value: bytes) -> float:
    found = _TIMEOUT.fullmatch(value)
    if found is None:
        raise ValueError("grpc-timeout is up to eight digits and a unit")
    return int(found[1]) * UNITS_S[found[2]]


STATUS_200 = b"\x88"
CONTENT_TYPE = literal(b"content-type", b"application/grpc")
RESPONSE = STATUS_200 + CONTENT_TYPE
RESPONSE_GZIP = RESPONSE + literal(b"grpc-encoding", b"gzip")
OK = trailers(0)
