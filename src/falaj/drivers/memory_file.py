"""Anonymous files in memory."""

from __future__ import annotations

import ctypes
import os

CLOSE_ON_EXEC = 1


def create_memory_file(name: str) -> int:
    """Return the descriptor of a new file that is in memory only; `name` shows in /proc.

    Not `os.memfd_create`: a Python that was built for a glibc before 2.27, as those of uv are, has none.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.memfd_create(name.encode(), CLOSE_ON_EXEC)
    if descriptor < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return descriptor
