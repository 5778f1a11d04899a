"""A power cut on real files: what was not flushed to disk is empty afterwards, or was never there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest


@dataclass
class Disk:
    """What this process flushed: files with their inode, size and time, and directories with their entries."""

    files: dict[int, tuple[int, int]] = field(default_factory=dict)
    entries: dict[int, set[str]] = field(default_factory=dict)
    flushes: int = 0

    def note(self, handle: int) -> None:
        found = os.fstat(handle)
        self.flushes += 1
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            self.entries[found.st_ino] = set(os.listdir(handle))
        else:
            self.files[found.st_ino] = found.st_size, found.st_mtime_ns

    def cut_power(self, root: Path, *, spare: Sequence[str] = ()) -> list[str]:
        """Leave of `root` what was flushed, and return what was lost; names that fit `spare` are left alone."""
        lost = []
        for folder, below, names in os.walk(root):
            here = Path(folder)
            below[:] = [name for name in below if not any(fnmatch(name, pattern) for pattern in spare)]
            flushed = self.entries.get(here.stat().st_ino, set())
            for name in [*below, *names]:
                path = here / name
                if any(fnmatch(name, pattern) for pattern in spare):
                    continue
                found = path.stat()
                if name not in flushed:
                    lost.append(f"{path.relative_to(root)} (entry)")
                elif path.is_file() and self.files.get(found.st_ino) != (found.st_size, found.st_mtime_ns):
                    os.truncate(path, 0)
                    lost.append(f"{path.relative_to(root)}")
        return sorted(lost)


@contextmanager
def recorded_disk() -> Iterator[Disk]:
    """Record the flushes of this process."""
    disk, real = Disk(), os.fsync

    def fsync(handle: int) -> None:
        real(handle)
        disk.note(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield disk
