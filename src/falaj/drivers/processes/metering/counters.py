"""Counters that only grow, until they wrap around, start anew or are gone: what they have counted."""

from __future__ import annotations

from collections.abc import Callable


class CounterDelta:
    """What a counter has counted since it was first read.

    `limit` is where it begins at zero again; none: it never does, and one that has fallen was started anew.
    """

    def __init__(self, read: Callable[[], int | None], *, limit: int | None = None) -> None:
        self._read, self._limit = read, limit
        self._last = read()
        self.is_there = self._last is not None

    def more(self) -> int:
        """What was counted since the last look; nothing while the counter cannot be read."""
        now, last = self._read(), self._last
        if now is None or last is None:
            return 0
        self._last = now
        if now >= last:
            return now - last
        return now + (self._limit - last if self._limit else 0)
