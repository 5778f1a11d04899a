"""Pauses after failures, longer each time: what cannot be done now is not tried without end, nor given up."""

from __future__ import annotations

import time
from collections.abc import Iterable

LONGEST_S = 60.0


class Backoff:
    """Who rests, and until when; by the monotonic clock, so that nobody is held up by one that jumps."""

    def __init__(self, *, first_s: float, longest_s: float = LONGEST_S) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._until: dict[str, tuple[int, float]] = {}

    def begin(self, who: str) -> float:
        """Have `who` rest, longer than the last time; for how many seconds."""
        times = self._until.get(who, (0, 0.0))[0]
        seconds = min(self._first_s * float(1 << min(times, 30)), self._longest_s)
        self._until[who] = times + 1, time.monotonic() + seconds
        return seconds

    def still(self) -> list[str]:
        """Those that rest now."""
        now = time.monotonic()
        return [who for who, (_, until) in self._until.items() if now < until]

    def keep_only(self, there: Iterable[str]) -> None:
        """Forget all but these."""
        known = set(there)
        self._until = {who: rest for who, rest in self._until.items() if who in known}
