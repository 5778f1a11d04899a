"""Measures the disk usage of an attempt incrementally, while its code may change the files."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from falaj.drivers.processes.tree_removal import open_folder

MAX_DEPTH = 200
"""The depth is limited because each folder on the path is kept open, so that no link can redirect the scan."""
BLOCK_BYTES = 512
MAX_SHARES = 10_000
PAUSE_EVERY = 64
LISTING = stat.S_IRUSR | stat.S_IXUSR


@dataclass
class DiskUsage:
    """The usage of a folder. `shares` are the bytes below its entries, two levels deep, for at most `MAX_SHARES`."""

    size_bytes: int = 0
    entries: int = 0
    is_too_deep: bool = False
    shares: Counter[str] = field(default_factory=Counter)
    seen: set[tuple[int, int]] = field(default_factory=set, repr=False)

    @property
    def largest(self) -> str:
        """The path of the largest entry; of its largest child if that is more than half of it."""
        if not self.shares:
            return ""
        deep = [(size, path) for path, size in self.shares.items() if "/" in path]
        size, path = max([(self.shares[path], path) for path in self.shares if "/" not in path])
        below = max(((s, p) for s, p in deep if p.startswith(path + "/")), default=(0, ""))
        return below[1] if below[0] * 2 > size else path

    def subtract(self, given: DiskUsage) -> None:
        """Subtract the usage at the start."""
        self.size_bytes = max(0, self.size_bytes - given.size_bytes)  # user code may have removed it
        self.entries = max(0, self.entries - given.entries)
        self.shares.subtract(given.shares)

    def add_unlinked(self, size_bytes: int) -> None:
        """Add the size of files that were unlinked and are still open."""
        if size_bytes:
            self.size_bytes += size_bytes
            self.shares["files that were removed and are still open"] += size_bytes

    def add(self, path: list[str], found: os.stat_result) -> None:
        """Count one entry; a file with several hard links once."""
        self.entries += 1
        if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
            if (found.st_dev, found.st_ino) in self.seen:
                return
            self.seen.add((found.st_dev, found.st_ino))
        size = found.st_blocks * BLOCK_BYTES
        self.size_bytes += size
        for name in ("/".join(path[:depth]) for depth in (1, 2)[: len(path)]):
            if name in self.shares or len(self.shares) < MAX_SHARES:
                self.shares[name] += size


def measure_usage(folder: Path) -> DiskUsage:
    """Return the usage of `folder`."""
    walk = scan_usage(folder)
    while True:
        try:
            next(walk)
        except StopIteration as done:
            usage: DiskUsage = done.value
            return usage


def scan_usage(folder: Path) -> Generator[None, None, DiskUsage]:
    """Scan `folder` and return its usage; yield regularly, so that the caller can interleave other work.

    Entries that disappear count as nothing. Links are not followed, even if one replaces a folder meanwhile.
    """
    usage, path = DiskUsage(), list[str]()
    levels: list[tuple[int, Iterator[os.DirEntry[str]]]] = []
    try:
        _enter(levels, os.fspath(folder), above=None)
        while levels:
            opened, entries = levels[-1]
            entry = _next(entries)
            if entry is None:
                _leave(levels)
                del path[-1:]
                continue
            with contextlib.suppress(OSError):  # removed, or not readable
                found = entry.stat(follow_symlinks=False)
                usage.add([*path, entry.name], found)
                if stat.S_ISDIR(found.st_mode):
                    if len(levels) >= MAX_DEPTH:
                        usage.is_too_deep = True
                    else:
                        _enter(levels, entry.name, above=opened)
                        path.append(entry.name)
            if usage.entries % PAUSE_EVERY == 0:
                yield
    except OSError:
        pass  # the folder was removed, or no descriptors are left
    finally:
        while levels:
            _leave(levels)
    return usage


def _next(entries: Iterator[os.DirEntry[str]]) -> os.DirEntry[str] | None:
    with contextlib.suppress(OSError):
        return next(entries, None)
    return None


def _enter(levels: list[tuple[int, Iterator[os.DirEntry[str]]]], name: str, *, above: int | None) -> None:
    opened = open_folder(name, above, needed=LISTING)  # a closed one could otherwise hide files
    try:
        levels.append((opened, os.scandir(opened)))
    except OSError:
        os.close(opened)
        raise


def _leave(levels: list[tuple[int, Iterator[os.DirEntry[str]]]]) -> None:
    opened, entries = levels.pop()
    close = getattr(entries, "close", None)
    if close is not None:
        close()
    os.close(opened)


def free_bytes(folder: Path) -> int:
    """Return the free space of the volume for ordinary users."""
    volume = os.statvfs(folder)
    return volume.f_bavail * volume.f_frsize


def volume_bytes(folder: Path) -> int:
    volume = os.statvfs(folder)
    return volume.f_blocks * volume.f_frsize
