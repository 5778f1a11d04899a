"""Formats single values for people."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from falaj.records.governance.residency import Label
from falaj.records.sizes import format_size

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_ASCII = str.maketrans({"├": "|", "└": "`", "─": "-", "│": "|", "█": "#", "░": "."})


def format_value(value: Any, name: str = "") -> str:
    """Return `value` on one line; `name` is its field, which tells the unit."""
    if name.endswith("_bytes") and isinstance(value, int):
        return format_size(value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, Label):
        return value.describe()
    if isinstance(value, tuple | list | frozenset | set):
        items = [format_value(item) for item in value]
        return ", ".join(sorted(items) if isinstance(value, frozenset | set) else items) or "-"
    if isinstance(value, BaseModel):
        return str(getattr(value, "name", "") or to_json(value).decode())
    if isinstance(value, dict):
        return to_json(value).decode() if value else "-"
    return printable(str(value))


def printable(text: str) -> str:
    """Return `text` with control characters and changes of text direction escaped."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def encodable(text: str, *, encoding: str | None = None) -> str:
    """Return `text` with lines and bars in ASCII where `encoding` (that of standard output) has no other ones."""
    try:
        text.encode(encoding or sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return text.translate(_ASCII)
    return text


def format_duration(value: timedelta) -> str:
    """Return a duration as it is typed: 30d, 12h, 90s."""
    seconds = value.total_seconds()
    for length, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds and seconds % length == 0:
            return f"{int(seconds // length)}{unit}"
    return f"{seconds:g}s"


def format_number(value: float | None) -> str:
    """Return a measured number with five significant digits."""
    return "-" if value is None else f"{value:.5g}"


def format_exact(value: float) -> str:
    """Return a configured number with all its digits."""
    return str(int(value)) if value == int(value) else repr(value)


def format_metrics(values: Mapping[str, float]) -> str:
    """Return metrics as `name value` pairs."""
    return ", ".join(f"{printable(name)} {format_number(value)}" for name, value in values.items()) or "-"


def format_elapsed(begin: datetime | None, end: datetime | None) -> str:
    """Return how long something took: 0.4s, 12m 5s, 3h 20m."""
    if begin is None or end is None:
        return "-"
    seconds = max((end - begin).total_seconds(), 0.0)
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60}m"


def plural(count: int, noun: str) -> str:
    """Return `count` and `noun`, in the plural where needed."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("ry") else f"{count} {noun}s"
