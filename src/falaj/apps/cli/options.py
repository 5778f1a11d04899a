"""The global options, which may be typed before or after a command."""

from __future__ import annotations

from typing import NamedTuple


class GlobalOptions(NamedTuple):
    """The global options as they were typed."""

    home: str | None = None
    url: str | None = None
    json: bool = False
