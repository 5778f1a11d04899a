"""Memory that is freed in a step stays with this process for the next one, which needs as much."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Of glibc's `mallopt`: how much free memory is kept at the end of the heap, and what is never taken from the heap."""
MOST_KEPT_BYTES = 2**31 - 1
LARGEST_IN_HEAP_BYTES = 32 << 20
"""The most that glibc takes for either."""
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


@contextmanager
def retained_heap() -> Iterator[None]:
    """Inside, freed memory is not given back to the system; what is free at the end, is."""
    retain_heap()
    try:
        yield
    finally:
        with suppress(OSError, AttributeError, TypeError):  # a system without glibc
            ctypes.CDLL(None).malloc_trim(0)


def retain_heap() -> None:
    """Keep freed memory from here on: else glibc gives it back after each step, and each page of it faults again."""
    if any(name in os.environ for name in SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return  # somebody has chosen otherwise
    with suppress(OSError, AttributeError, TypeError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES)
        allocator.mallopt(TRIM_THRESHOLD, MOST_KEPT_BYTES)
