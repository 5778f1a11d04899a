"""Durability: what was flushed here survives a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Flush the entries of `directory` to disk, so that created and renamed files survive a power failure."""
    _sync(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def sync_directories(root: Path) -> None:
    """Flush the entries of `root` and of all folders below it to disk."""
    for folder, _folders, _names in os.walk(root):
        sync_directory(Path(folder))


def sync_file(path: Path) -> None:
    """Flush the bytes of the file `path` to disk, whoever wrote them."""
    _sync(path, os.O_RDONLY | os.O_CLOEXEC)


def make_directories(directory: Path, *, below: Path | None = None) -> None:
    """Create `directory` and its parents durably.

    Those below `below` that exist are flushed when this process meets them first: their maker may have been killed.
    """
    is_met = below is None or directory in _met or not directory.is_relative_to(below)
    if directory.is_dir() and is_met:
        return
    make_directories(directory.parent, below=below)
    directory.mkdir(mode=0o700, exist_ok=True)
    sync_directory(directory.parent)
    _met.add(directory)


_met: set[Path] = set()


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
