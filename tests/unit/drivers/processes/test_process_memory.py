"""The memory of processes, as /proc tells it: what they hold, and what the kernel could drop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from falaj.drivers.processes.metering import process_tree
from falaj.drivers.processes.metering.process_tree import MemoryUse, descendants, measure_memory

MIB = 1 << 20
PRIVATE = "held = bytearray(50 << 20)"
SHARED = "import mmap; held = mmap.mmap(-1, 50 << 20); held.write(bytes(50 << 20))"
MEMFD = (
    "import ctypes, os; held = ctypes.CDLL(None).memfd_create(b'held', 0); os.write(held, bytes(50 << 20))"
)
MEMFD_MAPPED = f"{MEMFD}; import mmap; seen = mmap.mmap(held, 0); seen.write(bytes(50 << 20))"
FILE = """import mmap, sys
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
sum(held[at] for at in range(0, len(held), 4096))"""


@contextmanager
def holding(script: str, *arguments: str) -> Iterator[MemoryUse]:
    """What a process holds after a script, without what Python takes."""
    pipe = subprocess.PIPE
    program = f"{script}\nprint('up', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program, *arguments], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield measure_memory({process.pid: descendants(os.getpid())[process.pid]})
        process.kill()


@pytest.mark.parametrize("script", [PRIVATE, SHARED, MEMFD, MEMFD_MAPPED])
def test_private_and_shared_memory_is_held_and_counts_once(script: str) -> None:
    with holding(script) as memory:
        assert 50 * MIB <= memory.held_bytes < 80 * MIB


def test_a_mapped_file_is_not_held(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(bytes(50 * MIB))

    with holding(FILE, str(tmp_path / "rows")) as memory:
        assert memory.held_bytes < 40 * MIB


def test_a_process_that_hides_its_map_is_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "proportional_bytes", lambda _: None)

    with holding(PRIVATE) as memory:
        assert 50 * MIB <= memory.held_bytes < 80 * MIB
