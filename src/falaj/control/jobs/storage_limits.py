"""Limits on what a job may store: the size of a checkpoint, and the free space of the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from falaj.errors import TooLarge
from falaj.records.sizes import format_size

CHECKPOINT_BYTES = 1 << 40
FREE_SHARE = 20
FREE_BYTES = 10 << 30
"""A twentieth of the volume, at most 10 GiB, stays free for what else the platform writes."""
CHECK_EVERY_BYTES = 64 << 20


@dataclass(frozen=True)
class StorageLimits:
    """Checked before and during uploads; TooLarge, with the numbers, if a limit is exceeded.

    `disk` is a folder on the volume of the blobs, or None where they are in a bucket.
    """

    checkpoint_bytes: int = CHECKPOINT_BYTES
    disk: Path | None = None

    def require(self, size: int, *, beside: int, what: str) -> None:
        """Raise TooLarge if `what`, of `size` bytes `beside` those that the checkpoint has, exceeds a limit."""
        if beside + size > self.checkpoint_bytes:
            raise TooLarge(
                f"{what} takes {format_size(size)}"
                + (f" beside {format_size(beside)}" if beside else "")
                + ", and a checkpoint "
                f"may take {format_size(self.checkpoint_bytes)}; have jobs.checkpoint_limit in falaj.toml raised"
            )
        self._require_disk(size, what)

    def watch(self, body: Iterator[bytes], *, what: str) -> Iterator[bytes]:
        """Yield the same bytes; TooLarge if the disk fills up meanwhile."""
        unseen = 0
        for piece in body:
            unseen += len(piece)
            if unseen >= CHECK_EVERY_BYTES:
                self._require_disk(unseen, what)
                unseen = 0
            yield piece

    def _require_disk(self, size: int, what: str) -> None:
        if self.disk is None:
            return
        volume = os.statvfs(self.disk)
        free, whole = volume.f_bavail * volume.f_frsize, volume.f_blocks * volume.f_frsize
        kept = min(whole // FREE_SHARE, FREE_BYTES)
        if size > free - kept:
            raise TooLarge(
                f"{what} takes {format_size(size)}, and the disk of the blobs has {format_size(free)} left, "
                f"{format_size(kept)} of which stay free; keep fewer checkpoints (checkpoint_keep), or free space there"
            )
