"""Compressed bodies: gzip and deflate, with a limit on what comes out of them."""

from __future__ import annotations

import zlib
from functools import lru_cache

from falaj.errors import InvalidInput, TooLarge

MIN_COMPRESSED_BYTES = 16 * 1024
"""Smaller responses are sent as they are: they fit into a few packets."""
LEVEL = 1
"""The quickest: numbers as text hardly become smaller with more work."""

_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
CODINGS = frozenset(_WINDOW_BITS)


def decompress(body: bytes, coding: bytes, *, limit: int) -> bytes:
    """Return what `body` contains. Raise TooLarge beyond `limit` bytes, InvalidInput if it is damaged."""
    stream = zlib.decompressobj(_WINDOW_BITS[coding])
    try:
        plain = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidInput(f"the body is not {coding.decode()}: {error}") from None
    if len(plain) > limit:
        raise TooLarge(f"the decompressed body exceeds the limit of {limit} bytes")
    if not stream.eof:
        raise InvalidInput(f"the {coding.decode()} body is truncated")
    if stream.unused_data:
        raise InvalidInput(f"{len(stream.unused_data)} bytes follow the {coding.decode()} body")
    return plain


def compress(body: bytes, coding: bytes) -> bytes:
    stream = zlib.compressobj(LEVEL, wbits=_WINDOW_BITS[coding])
    return stream.compress(body) + stream.flush()


@lru_cache(maxsize=256)
def accepted_coding(header: bytes) -> bytes:
    """Return the coding of a response by an Accept-Encoding header; empty: none."""
    weights: dict[bytes, float] = {}
    for part in header.lower().split(b",")[:32]:
        coding, _, parameter = part.partition(b";")
        name, _, value = parameter.strip().partition(b"=")
        weights[coding.strip()] = _weight(value) if name.strip() == b"q" else 1.0
    anything = weights.get(b"*", 0.0)
    found = max((b"gzip", b"deflate"), key=lambda coding: weights.get(coding, anything))
    return found if weights.get(found, anything) > 0 else b""


def _weight(text: bytes) -> float:
    try:
        weight = float(text)
    except ValueError:
        return 0.0
    return weight if 0 <= weight <= 1 else 0.0
