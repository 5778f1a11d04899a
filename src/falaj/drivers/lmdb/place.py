"""The file of an online store: opened, checked in a process of its own, and renamed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from falaj.drivers.fsync import sync_directory
from falaj.drivers.lmdb.online import MAP_BYTES, LmdbOnlineStore


class LmdbFile:
    """An OnlinePlace: a file, and the lock beside it, which processes of one machine share."""

    def __init__(self, file: Path, *, map_bytes: int = MAP_BYTES) -> None:
        self.file = file.absolute()
        self._map_bytes = map_bytes

    @property
    def address(self) -> str:
        return str(self.file)

    def open(self) -> LmdbOnlineStore:
        return LmdbOnlineStore(self.file, map_bytes=self._map_bytes)

    def is_sound(self) -> bool:
        """Ask a process of its own: LMDB may crash on a damaged file."""
        if not self.file.exists():
            return True
        command = [sys.executable, "-m", "falaj.drivers.lmdb.check", self.address]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def set_aside(self, suffix: str) -> str | None:
        if not self.file.exists():
            return None
        kept = self.file.rename(self.file.with_name(f"{self.file.name}.{suffix}"))
        self.file.with_name(f"{self.file.name}-lock").unlink(missing_ok=True)
        sync_directory(self.file.parent)
        return str(kept)
