"""Notices that an attempt shows no sign of life.

The contract with the code: FALAJ_HEARTBEAT names a folder. A rank that touches the file of its number there, at most
once a second, promises to go on doing so until it removes the file, and is judged by that alone. Whoever touches the
file `any`, or prints something, shows life for all ranks that made no such promise. Only changes count, by our own
monotonic clock: what time the files bear does not matter. The promise of a rank that has ended is void.
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
"""So many are looked at: user code can make any number, and has the rest of the time for it."""


class HeartbeatMonitor:
    """How long each rank has been silent; every `now` is a reading of one monotonic clock."""

    def __init__(self, hang_s: float, *, now: float) -> None:
        self._hang_s = hang_s
        self._life_at = now
        self._any: int | None = None
        self._beats: dict[int, tuple[int, float]] = {}  # rank -> the file's time, and when we saw it change
        self._discarded: dict[int, int] = {}  # rank -> the time that its file bore

    def record_output(self, now: float) -> None:
        """Something was printed."""
        self._life_at = now

    def check(self, beats: Mapping[str, int], now: float) -> None:
        """Take note of the files by their names, and of the times they bear."""
        touched = beats.get(ANY)
        if touched != self._any:
            self._any, self._life_at = touched, now
        told = {int(name): at for name, at in beats.items() if name.isdecimal() and int(name) < MAX_RANKS}
        ranks = {rank: at for rank, at in told.items() if self._discarded.get(rank) != at}
        if self._beats.keys() - ranks.keys():
            self._life_at = now  # one ended its promise, which is life too
        self._beats = {
            rank: before if (before := self._beats.get(rank)) and before[0] == at else (at, now)
            for rank, at in ranks.items()
        }

    def discard(self, ranks: Iterable[int]) -> None:
        """Expect nothing more of ranks that are gone, unless their files change again."""
        self._discarded |= {rank: self._beats.pop(rank)[0] for rank in ranks}

    def silent_ranks(self, now: float) -> list[int] | None:
        """The ranks that were silent for too long, the longest first; empty: who knows which; none: all is well."""
        late = [(seen, rank) for rank, (_, seen) in self._beats.items() if now - seen >= self._hang_s]
        if late:
            return [rank for _, rank in sorted(late)]
        if not self._beats and now - self._life_at >= self._hang_s:
            return []
        return None


def prepare_folder(directory: Path, hook: str) -> Path:
    """Make the folder of heartbeats, before user code owns the directory."""
    folder = directory / FOLDER
    folder.mkdir(mode=0o700)
    (folder / "sitecustomize.py").write_text(hook, encoding="utf-8")
    (folder / STACKS_FILE).touch()
    return folder


def read_heartbeats(folder: Path) -> dict[str, int]:
    """The files there and the times they bear, whatever user code has made of them."""
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
        pass  # one went meanwhile; there is a next look
    finally:
        os.close(opened)
    return found
