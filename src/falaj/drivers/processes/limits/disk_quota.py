"""Decides when an attempt uses too much disk: more than its quota, or the most of all when the volume runs full.

File system quotas are not available everywhere, so the attempt's directory is measured repeatedly. Between two
measurements a single file cannot exceed the quota (RLIMIT_FSIZE), and all attempts together cannot fill the volume for
long: under disk pressure, the attempt with the highest usage is stopped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from falaj.drivers.processes.attempt_folder import AttemptFolder
from falaj.drivers.processes.limits.disk_usage import DiskUsage, free_bytes, scan_usage, volume_bytes
from falaj.records.sizes import format_size

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.5, 30.0
PAUSE_FACTOR = 20
"""The pause after a scan, as a multiple of its duration."""
SLICE_S = 0.01
ENTRY_BYTES = 4096
ENTRIES_FREE = 10_000
RESERVE_BYTES = 1 << 30
RESERVE_SHARE = 0.02
MIN_CULPRIT_BYTES = 64 << 20
"""An attempt that uses less is not stopped for disk pressure."""
CONFIRMING_CHECKS = 3
CHECK_INTERVAL_S = 1.0


class UsageScan:
    """Scans a directory repeatedly, in short time slices."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._walk: Generator[None, None, DiskUsage] | None = None
        self._spent_s = 0.0
        self._next_at = 0.0

    def advance(self, now: float) -> DiskUsage | None:
        """Continue for one time slice. Return the usage when a scan is complete."""
        if self._walk is None:
            if now < self._next_at:
                return None
            self._walk, self._spent_s = scan_usage(self._directory), 0.0
        begun = time.monotonic()
        try:
            while time.monotonic() - begun < SLICE_S:
                next(self._walk)
        except StopIteration as done:
            self._spent_s += time.monotonic() - begun
            self._walk = None
            self._next_at = now + min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, PAUSE_FACTOR * self._spent_s))
            usage: DiskUsage = done.value
            return usage
        self._spent_s += time.monotonic() - begun
        return None


@dataclass(frozen=True)
class DiskQuota:
    """The disk quota of an attempt."""

    limit_bytes: int

    @property
    def limit_entries(self) -> int:
        """The most files: empty ones use no blocks, and are limited too."""
        return ENTRIES_FREE + self.limit_bytes // ENTRY_BYTES

    def fault(self, usage: DiskUsage) -> str | None:
        """Return why the attempt must end; none if it is within its quota."""
        size, entries = usage.size_bytes, usage.entries
        where = f" in {usage.largest}" if usage.largest else ""
        if size > self.limit_bytes:
            held = f"{format_size(size)} of {format_size(self.limit_bytes)}"
            return f"it filled its disk quota: {held}, most of it{where}"
        if entries > self.limit_entries:
            return f"it made too many files: {entries} of at most {self.limit_entries}, most bytes{where}"
        if usage.is_too_deep:
            return "its folders are nested too deep to be measured against its disk quota"
        return None


class DiskPressure:
    """Decides whether this attempt must end because its volume runs full and it has the highest usage of all here.

    Attempts publish their usage as the length of an empty file, which needs no disk space.
    """

    def __init__(self, folder: AttemptFolder, directory: Path, *, reserve_bytes: int | None = None) -> None:
        self._folder = folder
        self._directory = directory
        least = min(RESERVE_BYTES, int(volume_bytes(directory) * RESERVE_SHARE))
        self._reserve_bytes = least if reserve_bytes is None else reserve_bytes
        self._next_at = 0.0
        self._looks = 0
        self.is_short = False

    def check(self, now: float) -> None:
        if now < self._next_at:
            return
        self._next_at = now + CHECK_INTERVAL_S
        with contextlib.suppress(OSError):  # user code has removed the directory
            self.is_short = free_bytes(self._directory) < self._reserve_bytes
        self._looks = self._looks + 1 if self.is_short else 0

    def fault(self, usage: DiskUsage) -> str | None:
        """Return why the attempt must end; none if another one must, or if that is not known yet."""
        publish_usage(self._folder.usage, usage.size_bytes)
        is_settled = self._looks >= CONFIRMING_CHECKS  # by then, the others have published theirs
        if not is_settled or usage.size_bytes < MIN_CULPRIT_BYTES or not self._is_largest(usage.size_bytes):
            return None
        held, free = format_size(usage.size_bytes), format_size(free_bytes(self._directory))
        where = f", most of it in {usage.largest}" if usage.largest else ""
        return f"the disk ran full ({free} left), and it held most of all attempts here: {held}{where}"

    def _is_largest(self, own: int) -> bool:
        others = [
            AttemptFolder(path) for path in self._folder.path.parent.iterdir() if path != self._folder.path
        ]
        usages = [(published_usage(other.usage), other.path.name) for other in others if other.is_locked()]
        return all((own, self._folder.path.name) > other for other in usages)


def publish_usage(path: Path, size_bytes: int) -> None:
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.ftruncate(opened, size_bytes)
        finally:
            os.close(opened)


def published_usage(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
