"""Values of tensors in JSON: floats in their shortest form, NaN and infinities as bare words, as Triton does."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

Array = npt.NDArray[Any]

_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_encode = msgspec.json.Encoder().encode

_MARK = secrets.token_hex(8)
"""Tells a number that was written as a word from a text of the caller, who cannot guess it."""
_WORD = re.compile(
    rb'"(?:[^"\\]+|\\.|\\\Z)*+(?:"|\Z)|([\[,]\s*+)(-?)(NaN|Inf(?:inity)?)(?=\s*+[\],])', re.DOTALL
)
"""A text, which is passed over, or a word in a list. Each byte is looked at once, whatever the bytes are."""
_NUMBERS = {
    f"{_MARK}{sign}{word}": float(f"{sign}{word}")
    for sign in ("", "-")
    for word in ("NaN", "Inf", "Infinity")
}


def encode_values(array: Array) -> bytes:
    """Return the values of `array` as a flat JSON list; a float32 has the digits that tell it from its neighbours."""
    if array.dtype.kind == "O":
        encoded: bytes = _encode(array.ravel().tolist())
        return encoded
    data = orjson.dumps(np.ascontiguousarray(array).ravel(), option=_NUMPY)
    return _with_words(data, array) if b"null" in data else data


def _with_words(data: bytes, array: Array) -> bytes:
    """Write the words of values that are not finite in place of null."""
    flat = array.ravel()
    values = flat[~np.isfinite(flat)].tolist()
    words = [b"NaN" if value != value else b"Infinity" if value > 0 else b"-Infinity" for value in values]
    parts = data.split(b"null")
    return b"".join(piece for pair in zip(parts, [*words, b""], strict=True) for piece in pair)


def mark_words(text: bytes | memoryview) -> bytes | None:
    """Return JSON with the words NaN, Inf and Infinity in lists as marked texts; None if it has no such words."""
    changes = 0

    def marked(found: re.Match[bytes]) -> bytes:
        nonlocal changes
        before, sign, word = found.groups()
        if before is None:
            return found[0]
        changes += 1
        return b'%b"%b%b%b"' % (before, _MARK.encode(), sign, word)

    replaced = _WORD.sub(marked, text)
    return replaced if changes else None


def has_words(data: bytes) -> bool:
    """Return whether `mark_words` has marked a value in `data`."""
    return _MARK.encode() in data


def unmarked(values: Sequence[float | str]) -> list[float]:
    """Return numbers for values with marked words. Raise ValueError if another text is among them."""
    try:
        return [_NUMBERS[value] if type(value) is str else float(value) for value in values]
    except KeyError:
        raise ValueError("Expected `float`, got `str`") from None
