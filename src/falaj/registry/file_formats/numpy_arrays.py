"""Parse the header of NumPy array files; reject what could load Python objects."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

MAGIC = b"\x93NUMPY"
HEADER_LIMIT = 3000
"""Longer than the header of any plain array."""
HEAD_BYTES = HEADER_LIMIT + 12
KEYS = {"descr", "fortran_order", "shape"}

RECORD_DEPTH = 4
_DESCR = re.compile(r"[<>|=]?(?P<kind>[?bBiufcSUVmM])(?P<size>\d{0,9})(\[\w{1,20}\])?")
_CHARACTER_BYTES = {"U": 4}


def is_array(head: bytes) -> bool:
    return head.startswith(MAGIC)


def array_fault(head: bytes, size_bytes: int) -> str | None:
    """Return what is wrong with the array file of this size that begins with `head`; none if it is plain numbers."""
    start, length = _header_span(head)
    if length > HEADER_LIMIT or len(head) < start + length:
        return "a NumPy array whose header is cut or too long"
    fields = _fields(head[start : start + length])
    if fields is None:
        return "a NumPy array whose header is not the one that NumPy writes"
    item_bytes = _item_bytes(fields["descr"])
    if item_bytes is None:
        return "a NumPy array that can hold Python objects, which are pickled"
    if size_bytes != start + length + math.prod(fields["shape"]) * item_bytes:
        return "a NumPy array with more or fewer bytes than its shape says"
    return None


def _item_bytes(descr: Any, depth: int = 0) -> int | None:
    """Return the size of an item of plain numbers and texts, also of a record of such; none for anything else."""
    if isinstance(descr, str):
        kind = _DESCR.fullmatch(descr)
        return None if kind is None else int(kind["size"] or 1) * _CHARACTER_BYTES.get(kind["kind"], 1)
    if not isinstance(descr, list) or depth > RECORD_DEPTH:
        return None
    total = 0
    for field in descr:
        if not isinstance(field, tuple) or len(field) not in (2, 3) or not isinstance(field[0], str):
            return None
        shape = field[2] if len(field) == 3 else ()
        inner = _item_bytes(field[1], depth + 1)
        if inner is None or not _is_shape(shape):
            return None
        total += inner * math.prod(shape)
    return total


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple) and all(type(each) is int and 0 <= each < 1 << 63 for each in shape)


def _header_span(head: bytes) -> tuple[int, int]:
    start = 12 if len(head) > 6 and head[6] >= 2 else 10
    return start, int.from_bytes(head[8:start], "little")


def _fields(header: bytes) -> dict[str, Any] | None:
    """Return the three fields, each written once; none if there is anything else in the header."""
    try:
        tree = ast.parse(header.decode("utf-8").strip(), mode="eval").body
        if not isinstance(tree, ast.Dict):
            return None
        names = [ast.literal_eval(key) for key in tree.keys if key is not None]
        values = [ast.literal_eval(value) for value in tree.values]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    if len(names) != len(values) or sorted(map(str, names)) != sorted(KEYS):
        return None
    found = dict(zip(map(str, names), values, strict=True))
    return found if _is_shape(found["shape"]) and isinstance(found["fortran_order"], bool) else None
