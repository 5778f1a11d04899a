"""Quantities as Kubernetes writes them: 1930m, 64, 512Gi."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    **{f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", start=1)},
    **{letter: Fraction(1, 1000**power) for power, letter in enumerate("mun", start=1)},
    "": Fraction(1),
}


def read_quantity(text: object) -> Fraction:
    """Return the number; 0 for what is none, so that a node that says nonsense offers nothing."""
    found = re.fullmatch(
        r"\+?(\d{1,30}(?:\.\d{0,30})?)(?:[eE]([+-]?\d{1,2}))?([A-Za-z]{0,2})", str(text).strip()
    )
    if found is None or found[3] not in _UNITS:
        return Fraction(0)
    return Fraction(found[1].rstrip(".")) * Fraction(10) ** int(found[2] or 0) * _UNITS[found[3]]


def read_count(text: object) -> int:
    """Return the whole part of a quantity."""
    return int(read_quantity(text))
