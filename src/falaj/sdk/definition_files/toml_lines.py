"""Finds the line of a field in a TOML document; tomllib does not report it."""

from __future__ import annotations

import re
from collections import Counter

Location = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_ENTRY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=(.*)$""")


class TomlLines:
    """Finds lines by location: table names, numbers of tables in an array, and the key."""

    def __init__(self, text: str) -> None:
        self._lines: dict[Location, int] = {}
        self._counts: Counter[Location] = Counter()
        at: Location = ()
        within: str | None = None  # the quotes of a text that runs over several lines
        for number, line in enumerate(text.splitlines(), 1):
            if within is not None:
                within = None if within in line else within
            elif header := _HEADER.match(line):
                at = self._enter(header[2], is_array=header[1] == "[[")
                self._lines.setdefault(at, number)
            elif entry := _ENTRY.match(line):
                self._lines.setdefault((*at, *_names(entry[1])), number)
                within = _left_open(entry[2])

    def line(self, at: Location) -> int:
        """The line of the field, or of the nearest thing around it."""
        while at:
            if at in self._lines:
                return self._lines[at]
            at = at[:-1]
        return 1

    def _enter(self, dotted: str, *, is_array: bool) -> Location:
        *outer, last = _names(dotted)
        at: Location = ()
        for name in outer:
            at = self._current((*at, name))
        at = (*at, last)
        if is_array:
            self._counts[at] += 1
        return self._current(at)

    def _current(self, at: Location) -> Location:
        return (*at, self._counts[at] - 1) if self._counts[at] else at


def _names(dotted: str) -> list[str]:
    return [name.strip("\"' ") for name in re.findall(r""""[^"]*"|'[^']*'|[^.]+""", dotted)]


def _left_open(value: str) -> str | None:
    for quotes in ('"' * 3, "'" * 3):
        if value.strip().startswith(quotes) and value.count(quotes) == 1:
            return quotes
    return None
