"""Sizes in bytes: parsed as people type them (512MiB, 8GiB, 1.5TB), and formatted."""

from __future__ import annotations

import re
from fractions import Fraction

RULE = "a number followed by KiB, MiB, GiB or TiB (or KB, MB, GB or TB, by thousands), like 8GiB"

_UNITS = {"b": 1} | {
    f"{letter}{rest}": step**power
    for power, letter in enumerate("kmgt", start=1)
    for rest, step in (("ib", 1024), ("b", 1000))
}
_BINARY = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def read_size(text: object) -> int | None:
    """Return the bytes that `text` gives; none if it does not follow the rule, or is less than a byte."""
    if not isinstance(text, str):
        return None
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([a-z]{1,3})", text.strip().lower(), re.ASCII)
    if found is None or found[2] not in _UNITS:
        return None
    size = int(Fraction(found[1]) * _UNITS[found[2]])
    return size if 0 < size < 1 << 62 else None


def spell_size(count: int) -> str:
    """Return `count` bytes exactly, as they would be typed."""
    return next((f"{count // step}{unit}" for unit, step in _BINARY if count % step == 0), f"{count}B")


def format_size(count: float) -> str:
    """Return `count` bytes with three digits, in the largest unit that leaves at least one: 10.6 GiB, 512 MiB."""
    unit, step = next(((unit, step) for unit, step in _BINARY if count >= step), ("bytes", 1))
    return f"{count / step:.3g} {unit}" if step > 1 and count < 100 * step else f"{count / step:.0f} {unit}"
