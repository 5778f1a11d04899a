"""The process that watches over one attempt: it outlives the platform, and the user's code does not outlive it.

    python -m falaj.drivers.processes.shim FOLDER

Returns as soon as another process, which stays, has the folder's lock; or if somebody else has it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from falaj.drivers.processes.folder import Folder


def main(path: Path) -> None:
    folder = Folder(path)
    lock = folder.take()
    if lock is None or os.fork():
        return
    try:
        quiet(folder.faults)
        # Only now, since it takes a while, and nobody waits for it.
        from falaj.drivers.processes.watch import watch

        watch(folder)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def quiet(faults: Path) -> None:
    """Let go of whoever waits for our output; from here on, faults of ours are written down."""
    target = os.open(faults, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
