"""How much a job may save: the most that one checkpoint takes, and what stays free of the disk."""

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
"""A twentieth of the volume stays free for everything else that the platform writes down, and no more than this."""
LOOK_EVERY_BYTES = 64 << 20


@dataclass(frozen=True)
class StorageLimits:
    """Asked before and while something is uploaded; TooLarge, with the numbers, is its refusal.

    `disk` is a folder on the volume of the blobs; none where they lie in a bucket.
    """

    checkpoint_bytes: int = CHECKPOINT_BYTES
    disk: Path | None = None

    def require(self, size: int, *, beside: int, what: str) -> None:
        """Refuse `what`, so many bytes `beside` those that the same checkpoint has already."""
        if beside + size > self.checkpoint_bytes:
            raise TooLarge(
                f"{what} takes {format_size(size)}"
                + (f" beside {format_size(beside)}" if beside else "")
                + ", and a checkpoint "
                f"may take {format_size(self.checkpoint_bytes)}; have jobs.checkpoint_limit in falaj.toml raised"
            )
        self._require_disk(size, what)

    def watch(self, body: Iterator[bytes], *, what: str) -> Iterator[bytes]:
        """The same bytes, as long as the disk has room: others fill it too."""
        unseen = 0
        for piece in body:
            unseen += len(piece)
            if unseen >= LOOK_EVERY_BYTES:
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
                f"{format_size(kept)} of which "
                "stay free; keep fewer checkpoints (checkpoint_keep), or have somebody make room there"
            )
