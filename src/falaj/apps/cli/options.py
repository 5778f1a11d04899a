"""The global options: they may stand in front of a command or behind it."""

from __future__ import annotations

from typing import NamedTuple


class GlobalOptions(NamedTuple):
    """The global options as they were typed."""

    home: str | None = None
    url: str | None = None
    json: bool = False
