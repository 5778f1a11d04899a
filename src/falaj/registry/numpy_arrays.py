"""Inspect the header of NumPy array files for Python objects."""

from __future__ import annotations

import re

MAGIC = b"\x93NUMPY"
HEADER_LIMIT = 3000
"""Longer than the header of any plain array; a longer one counts as an array of objects."""

_DESCR = re.compile(rb"'descr':\s*'[<>|=]?[?bBiufcSUmM]\d*(\[\w+\])?'")


def is_array(head: bytes) -> bool:
    return head.startswith(MAGIC)


def holds_objects(head: bytes) -> bool:
    """Return whether loading the array could load pickles: its dtype is not a plain number or text type."""
    wide = len(head) > 6 and head[6] >= 2
    start = 12 if wide else 10
    length = int.from_bytes(head[8:start], "little")
    header = head[start : start + min(length, HEADER_LIMIT)]
    return length > HEADER_LIMIT or len(header) < length or _DESCR.search(header) is None
