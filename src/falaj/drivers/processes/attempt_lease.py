"""The lease of all attempts of a home: a supervisor stops its attempt when the lease has run out (decision 0023).

The deadline is the modification time of an empty file, in seconds since boot. So it is renewed in one step, also on a
full disk, and a renewal that comes late, because its process was paused, does not move it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from falaj.ports.machine.boot import boot_seconds

NANO = 1_000_000_000


@dataclass(frozen=True)
class AttemptLease:
    """The lease at `path`, which lasts `lasts_s` from each renewal."""

    path: Path
    lasts_s: float

    def renew(self, since: float) -> None:
        """Extend the lease, counted from `since`, a reading of `boot_seconds` before the right to renew was proven."""
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        until = int((since + self.lasts_s) * NANO)
        os.utime(self.path, ns=(until, until))

    def left_s(self) -> float:
        """Return the seconds until the lease runs out; 0 if it has, or is not there."""
        try:
            return max(0.0, self.path.stat().st_mtime_ns / NANO - boot_seconds())
        except OSError:
            return 0.0


def is_over(path: Path, now: float) -> bool:
    """Return whether the lease at `path` has run out by `now`, or is not there."""
    try:
        return path.stat().st_mtime_ns <= int(now * NANO)
    except OSError:
        return True
