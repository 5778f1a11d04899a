"""Keep freed heap memory in the process during training: the next step needs as much."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`: free memory kept at the end of the heap, and the size from which mmap is used."""
MOST_KEPT_BYTES = 2**31 - 1
LARGEST_IN_HEAP_BYTES = 32 << 20
"""The maximum values that glibc accepts."""
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


@contextmanager
def retained_heap() -> Iterator[None]:
    """Keep freed memory in the process; return it to the system at the end."""
    retain_heap()
    try:
        yield
    finally:
        with suppress(OSError, AttributeError, TypeError):  # a system without glibc
            ctypes.CDLL(None).malloc_trim(0)


def retain_heap() -> None:
    """Keep freed memory from now on: else glibc returns it after each step, and every page faults again."""
    if any(name in os.environ for name in SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return  # the user has configured malloc
    with suppress(OSError, AttributeError, TypeError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES)
        allocator.mallopt(TRIM_THRESHOLD, MOST_KEPT_BYTES)
