"""Keeps the cores of a machine busy until it is stopped, so that tests run beside it: python tests/load.py [CORES]."""

from __future__ import annotations

import os
import sys


def burn(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(1_000_000))
    os._exit(0)


if __name__ == "__main__":
    cores, parent = int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count() or 1, os.getpid()
    for _ in range(cores):
        if os.fork() == 0:
            burn(parent)
    print(f"{cores} cores are busy until this is stopped", flush=True)
    os.wait()
