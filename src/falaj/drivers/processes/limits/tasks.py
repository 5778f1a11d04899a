"""Counts the tasks of an attempt, and the space of unlinked files that they keep open."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

from falaj.drivers.processes.limits.disk_usage import BLOCK_BYTES
from falaj.drivers.processes.metering import process_tree

MIN_INTERVAL_S = 0.2
PAUSE_FACTOR = 20
"""The pause after a check, as a multiple of its duration."""


class TaskLimit:
    """The limit on processes and threads: all descendants of this process count."""

    def __init__(self, limit: int, *, root: Path = Path("/")) -> None:
        self._limit = limit
        self._root = root
        self._next_at = 0.0

    def check(self, now: float) -> int | None:
        """Return the number of tasks if a check is due and the limit is reached; else none."""
        if now < self._next_at:
            return None
        begun = time.monotonic()
        # One short file first, which is mostly enough.
        is_possible = count_machine_tasks(self._root) >= self._limit
        count = count_descendant_tasks(os.getpid(), root=self._root) if is_possible else 0
        self._next_at = now + max(MIN_INTERVAL_S, PAUSE_FACTOR * (time.monotonic() - begun))
        return count if count >= self._limit else None


def count_machine_tasks(root: Path) -> int:
    """Return the number of threads of the machine."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((root / "proc/loadavg").read_text().split()[3].partition("/")[2])
    return 1 << 62


def count_descendant_tasks(ancestor: int, *, root: Path = Path("/")) -> int:
    """Return the number of threads of all descendants of `ancestor`."""
    return sum(process.threads for process in process_tree.descendants(ancestor, root=root).values())


def unlinked_bytes(ancestor: int, device: int) -> int:
    """Return the size of unlinked files on `device` that descendants of `ancestor` keep open."""
    found = dict[int, int]()
    for pid in process_tree.descendants(ancestor):
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as opened:
            for each in opened:
                with contextlib.suppress(OSError):
                    file = each.stat()
                    if file.st_nlink == 0 and file.st_dev == device and stat.S_ISREG(file.st_mode):
                        found[file.st_ino] = file.st_blocks * BLOCK_BYTES
    return sum(found.values())
