"""The ends of a process in a row: how long to wait before its next start, and one sentence if it keeps failing."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from falaj.records.record import utc_now

PAUSES_S = (0.1, 1.0, 5.0, 15.0, 30.0)
STEADY_S = 60.0
"""After running this long, a process that ends is started again after the shortest pause."""
REPEATS = 3
"""A process that ended so often with the same cause keeps failing."""
RECOVERED_S = 5.0
"""It has recovered when it has run this long, and twice as long as between its ends."""
LONGEST_CAUSE = 300


def describe_cause(error: BaseException) -> str:
    """Return the type of an error and the first line of its message: the others often hold times and values."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:LONGEST_CAUSE] if first else type(error).__name__


@dataclass
class RepeatedFailures:
    """Counts how often the process `name`, whose log is `log`, has ended in a row, and with which cause."""

    name: str
    log: Path | str
    count: int = 0
    cause: str = ""
    repeats: int = 0
    """How many of the last ends had `cause`."""
    since: datetime = field(default_factory=utc_now)
    longest_s: float = 0.0
    """How long it ran at most between them."""
    sentence: str | None = None
    """That it keeps failing, since when, why, and where its log is; none while it does not."""

    def add(self, cause: str, *, ran_s: float, now: datetime) -> float:
        """Add an end after `ran_s` seconds; return the pause before the next start, in seconds."""
        if ran_s > STEADY_S:
            self.count = 0
            self.clear()
        if cause != self.cause:
            self.cause, self.repeats, self.since, self.longest_s = cause, 0, now, 0.0
        else:  # before its first end it may have run well for a while
            self.longest_s = max(self.longest_s, ran_s)
        pause = PAUSES_S[min(self.count, len(PAUSES_S) - 1)]
        self.count += 1
        self.repeats += 1
        if self.repeats == REPEATS:
            since = f"{self.since:%Y-%m-%d %H:%M:%S %Z}"
            self.sentence = f"the {self.name} keeps failing since {since}: {cause}; its log is {self.log}"
        return pause

    def is_recovered(self, *, ran_s: float) -> bool:
        """Return whether a process that kept failing and has now run for `ran_s` seconds no longer does."""
        return self.sentence is not None and ran_s > max(RECOVERED_S, 2 * self.longest_s)

    def clear(self) -> None:
        """Forget the cause of the last ends; the pauses grow on until it has run for long."""
        self.cause, self.repeats, self.sentence = "", 0, None
