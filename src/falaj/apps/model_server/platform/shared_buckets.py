"""The rate limits of callers, shared by all replicas: a table in a file that each of them maps into its memory.

There are no locks. Two replicas that count requests of one caller in the same microsecond may count one of them: a
limit is exceeded by as little. If the table is full, further callers are not limited.
"""

from __future__ import annotations

import mmap
import os
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

SLOTS = 1 << 16
SLOT_BYTES = 16
TRIES = 8
"""Slots that a key may be in."""


class SharedBuckets:
    """When the bucket of each caller is full again, in monotonic seconds, which all processes count alike."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, SLOTS * SLOT_BYTES)
            memory = memoryview(mmap.mmap(descriptor, SLOTS * SLOT_BYTES))
        finally:
            os.close(descriptor)
        self._keys, self._times = memory.cast("Q"), memory.cast("d")

    def full_at(self, key: tuple[str, str]) -> float:
        slot = self._find(_hashed(key))
        return 0.0 if slot is None else self._times[2 * slot + 1]

    def fill(self, key: tuple[str, str], full_at: float, now: float) -> None:
        """Note when the bucket of `key` is full again."""
        hashed = _hashed(key)
        slot = self._find(hashed)
        if slot is None:
            slot = next((each for each in _slots(hashed) if self._times[2 * each + 1] <= now), None)
        if slot is not None:
            self._keys[2 * slot] = hashed
            self._times[2 * slot + 1] = full_at

    def _find(self, hashed: int) -> int | None:
        return next((slot for slot in _slots(hashed) if self._keys[2 * slot] == hashed), None)


def _slots(hashed: int) -> list[int]:
    return [(hashed + step) % SLOTS for step in range(TRIES)]


@lru_cache(maxsize=10_000)
def _hashed(key: tuple[str, str]) -> int:
    """Return a number that is the same in all processes."""
    return int.from_bytes(blake2b("\0".join(key).encode(), digest_size=8).digest()) or 1
