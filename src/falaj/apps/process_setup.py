"""Set-up of the platform's processes: the limit on open files, garbage collection, and ending with the parent."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable

from falaj.governance.operations.caller import start_thread


def raise_file_limit(enough: int | None = None) -> None:
    """Raise the limit on open files to the hard limit, or to `enough` for a process whose children inherit it.

    Each connection is an open file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if enough is not None:
        most = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def reduce_collections() -> None:
    """Exempt what exists now from garbage collection, and collect less often: requests create few cycles."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def stop_with_parent(stop: Callable[[], object]) -> None:
    """Call `stop` when the parent has ended: its end of our standard input is closed then."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        stop()

    start_thread(wait, name="parent-watch")
