"""Times, durations, sizes and numbers as pages show them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo


@dataclass(frozen=True)
class Times:
    """Writes times in the zone of the person."""

    zone: tzinfo

    def moment(self, at: datetime | None) -> str:
        """Return a time to the second, like 2026-11-17 13:05:09; a dash for none."""
        return "–" if at is None else f"{at.astimezone(self.zone):%Y-%m-%d %H:%M:%S}"

    def day(self, at: datetime) -> str:
        return f"{at.astimezone(self.zone):%Y-%m-%d}"

    def clock(self, at: datetime) -> str:
        return f"{at.astimezone(self.zone):%H:%M:%S}"

    def midnight(self, now: datetime) -> datetime:
        """Return when the person's day began."""
        here = now.astimezone(self.zone)
        return here.replace(hour=0, minute=0, second=0, microsecond=0).astimezone(UTC)

    @property
    def name(self) -> str:
        return str(self.zone)


def duration(length: timedelta | float | None) -> str:
    """Return a length of time in two units, like 2h 05m, or in one, like 7d; a dash for none."""
    if length is None:
        return "–"
    seconds = length.total_seconds() if isinstance(length, timedelta) else float(length)
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    whole = int(seconds)
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit_s:
            rest = whole % unit_s // part_s
            return f"{whole // unit_s}{unit}" + (f" {rest:02d}{part}" if rest else "")
    return "–"


def size(count: float | None) -> str:
    """Return an amount of bytes, like 1.5 GiB; a dash for none."""
    if count is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return "–"


def number(value: float | None) -> str:
    """Return a figure with four significant digits, like 0.9134 or 12,345; a dash for none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if not 10_000 <= abs(value) < 1e15 else f"{value:,.0f}"
