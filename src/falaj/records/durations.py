"""Lengths of time as people type them: 90s, 12h, 30d."""

from __future__ import annotations

import re
from datetime import timedelta

RULE = "a number followed by s, m, h or d"

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def read_duration(text: object) -> timedelta | None:
    """Return the duration that `text` names; none if it does not follow the rule."""
    found = re.fullmatch(r"(\d{1,9})([smhd])", text, re.ASCII) if isinstance(text, str) else None
    return timedelta(**{_UNITS[found[2]]: int(found[1])}) if found else None


def rough_duration(seconds: float) -> str:
    """Return a length of time in one unit, as people type it: the largest of which it has two or more."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f}{unit}"
    return f"{seconds:.0f}s"
