"""One value as people read it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from falaj.records.governance.residency import Label

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def format_value(value: Any, name: str = "") -> str:
    """`value` on one line; `name` is the field that holds it and tells its unit."""
    if name.endswith("_bytes") and isinstance(value, int):
        return size(value)
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
        return to_json(value).decode()
    return printable(str(value))


def printable(text: str) -> str:
    """`text` without what could steer a terminal: control characters and changes of direction are spelled out."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def size(count: int) -> str:
    """A number of bytes in the largest unit that leaves at least one."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} bytes" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def format_duration(value: timedelta) -> str:
    """A length of time as it is typed: 30d, 12h, 90s."""
    seconds = value.total_seconds()
    for length, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds and seconds % length == 0:
            return f"{int(seconds // length)}{unit}"
    return f"{seconds:g}s"


def format_number(value: float | None) -> str:
    """A measured figure, as many digits as are worth reading."""
    return "-" if value is None else f"{value:.5g}"


def format_exact(value: float) -> str:
    """A figure that somebody set, with all its digits."""
    return str(int(value)) if value == int(value) else repr(value)


def format_metrics(values: Mapping[str, float]) -> str:
    return ", ".join(f"{printable(name)} {format_number(value)}" for name, value in values.items()) or "-"


def format_elapsed(begin: datetime | None, end: datetime | None) -> str:
    """How long something took: 0.4s, 12m 5s, 3h 20m."""
    if begin is None or end is None:
        return "-"
    seconds = max((end - begin).total_seconds(), 0.0)
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60}m"


def plural(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("ry") else f"{count} {noun}s"
