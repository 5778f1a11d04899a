"""The header of a NumPy array file: whether its numbers are numbers."""

from __future__ import annotations

import re

MAGIC = b"\x93NUMPY"
HEADER_LIMIT = 3000
"""Longer than the header of any array of numbers; what does not fit counts as objects."""

_DESCR = re.compile(rb"'descr':\s*'[<>|=]?[?bBiufcSUmM]\d*(\[\w+\])?'")


def is_array(head: bytes) -> bool:
    return head.startswith(MAGIC)


def holds_objects(head: bytes) -> bool:
    """Whether loading the array could load pickles: its type is anything but one plain type of numbers or text."""
    wide = len(head) > 6 and head[6] >= 2
    start = 12 if wide else 10
    length = int.from_bytes(head[8:start], "little")
    header = head[start : start + min(length, HEADER_LIMIT)]
    return length > HEADER_LIMIT or len(header) < length or _DESCR.search(header) is None
