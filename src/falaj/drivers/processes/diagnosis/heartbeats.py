"""Detects hangs by heartbeats.

The contract with user code: FALAJ_HEARTBEAT names a folder. A rank may touch the file of its number there, at most once
a second; it must then continue until it removes the file, and is judged by that file alone. Touching the file `any`, or
printing something, counts for all ranks without a file of their own. Only changes count, by our own monotonic clock:
the modification times themselves do not matter. The file of a rank that has ended is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

FOLDER = ".heartbeat"
VARIABLE = "FALAJ_HEARTBEAT"
ANY = "any"
STACKS_FILE = "stacks"
CHECK_INTERVAL_S = 0.5
MAX_RANKS = 100_000
MAX_FILES = 4096
"""The most files that are read at once: user code can create any number."""


class HeartbeatMonitor:
    """Tracks since when each rank has been silent. Every `now` is a reading of one monotonic clock."""

    def __init__(self, hang_s: float, *, now: float) -> None:
        self._hang_s = hang_s
        self._life_at = now
        self._any: int | None = None
        self._beats: dict[int, tuple[int, float]] = {}  # rank -> modification time, and when we saw it change
        self._discarded: dict[int, int] = {}  # rank -> modification time of its file

    def record_output(self, now: float) -> None:
        """Record that something was printed."""
        self._life_at = now

    def check(self, read_heartbeats: Mapping[str, int], now: float) -> None:
        """Record the heartbeat files: name and modification time of each."""
        touched = read_heartbeats.get(ANY)
        if touched != self._any:
            self._any, self._life_at = touched, now
        reported = {
            int(name): at
            for name, at in read_heartbeats.items()
            if name.isdecimal() and int(name) < MAX_RANKS
        }
        ranks = {rank: at for rank, at in reported.items() if self._discarded.get(rank) != at}
        if self._beats.keys() - ranks.keys():
            self._life_at = now  # a rank removed its file, which is a sign of life
        self._beats = {
            rank: before if (before := self._beats.get(rank)) and before[0] == at else (at, now)
            for rank, at in ranks.items()
        }

    def discard(self, ranks: Iterable[int]) -> None:
        """Ignore the files of ranks that have ended, until they change again."""
        self._discarded |= {rank: self._beats.pop(rank)[0] for rank in ranks}

    def silent_ranks(self, now: float) -> list[int] | None:
        """Return the ranks that were silent too long, the longest first; empty if unknown which; none if none was."""
        late = [(seen, rank) for rank, (_, seen) in self._beats.items() if now - seen >= self._hang_s]
        if late:
            return [rank for _, rank in sorted(late)]
        if not self._beats and now - self._life_at >= self._hang_s:
            return []
        return None


def prepare_folder(directory: Path, hook: str) -> Path:
    """Create the folder of heartbeats, before user code owns the directory."""
    folder = directory / FOLDER
    folder.mkdir(mode=0o700)
    (folder / "sitecustomize.py").write_text(hook, encoding="utf-8")
    (folder / STACKS_FILE).touch()
    return folder


def read_heartbeats(folder: Path) -> dict[str, int]:
    """Return name and modification time of each heartbeat file, whatever user code has made of them."""
    found = {}
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return {}
    try:
        with os.scandir(opened) as entries:
            for entry in islice(entries, MAX_FILES):
                if entry.name == ANY or entry.name.isdecimal():
                    found[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
    except OSError:
        pass  # a file was removed meanwhile; the next check reads again
    finally:
        os.close(opened)
    return found
