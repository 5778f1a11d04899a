"""The findings of `falaj doctor`, one per check."""

from __future__ import annotations

from typing import Literal

from falaj.records.record import Record


class Finding(Record):
    """One check of the machine or the home: how it stands, and what mends it."""

    check: str
    status: Literal["ok", "warn", "fail"]
    words: str
    fix: str | None = None
