"""Hashes of table files: computed when a file is written, compared when it is read."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from pathlib import Path

from falaj.errors import Fault
from falaj.ports.tables import TableFile

RECHECK_SHARE = 1 / 64
"""The share of reads that hash a file again although it looks unchanged: a disk may lose bits without a write."""
MAX_KNOWN = 100_000
"""Files whose hash is kept in memory."""

FIX = (
    "put the file back from a backup; without one, ingest its rows into a new version of the view (falaj apply "
    "--keep-rows none), or build the training set again"
)

_Identity = tuple[int, ...]


class FileHashes:
    """The hashes of files, kept until the inode, size or times of a file change. Times of inodes cannot be set back."""

    def __init__(self, *, recheck_share: float = RECHECK_SHARE) -> None:
        self._recheck_share = recheck_share
        self._known: dict[Path, tuple[_Identity, str]] = {}
        self._lock = threading.Lock()

    def hash(self, path: Path) -> TableFile:
        """Hash the bytes of `path` now."""
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with self._lock:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[path] = _identity(found), digest
        return TableFile(path.name, found.st_size, digest)

    def fault(self, path: Path, written: TableFile, *, where: str, afresh: bool = False) -> Fault | None:
        """Return how `path` differs from what was written; none if it does not. `afresh`: hash it in any case."""
        try:
            found = self.hash(path) if afresh else self._recall(path)
        except FileNotFoundError:
            return Fault(where=where, given="no such file", allowed=_describe(written), fix=FIX)
        except OSError as error:
            return Fault(
                where=where, given=f"unreadable: {error.strerror}", allowed=_describe(written), fix=FIX
            )
        if (found.size_bytes, found.sha256) == (written.size_bytes, written.sha256):
            return None
        return Fault(where=where, given=_describe(found), allowed=_describe(written), fix=FIX)

    def _recall(self, path: Path) -> TableFile:
        found = path.stat()
        identity, digest = self._known.get(path, ((), ""))
        if identity != _identity(found) or random.random() < self._recheck_share:  # noqa: S311 - a sample
            return self.hash(path)
        return TableFile(path.name, found.st_size, digest)


def _identity(found: os.stat_result) -> _Identity:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _describe(file: TableFile) -> str:
    return f"{file.size_bytes} bytes with SHA-256 {file.sha256}"
