"""The descendants of a process from /proc: their CPU time, threads and memory."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from falaj.drivers.memory_file import create_memory_file

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
BLOCK_BYTES = 512
MEMORY_FOLDERS = ("/dev/shm", "/tmp")  # noqa: S108 - where a sandbox has file systems in memory of its own


@dataclass(frozen=True)
class ProcessStat:
    """An entry of /proc/PID/stat. `ticks` include those of reaped children."""

    parent: int
    ticks: int
    threads: int
    pages: int


def descendants(top: int, *, root: Path = Path("/")) -> dict[int, ProcessStat]:
    """Return all living descendants of `top`."""
    everyone = read_processes(root)
    children: dict[int, list[int]] = {}
    for pid, process in everyone.items():
        children.setdefault(process.parent, []).append(pid)
    found, waiting = {}, list(children.get(top, ()))
    while waiting:
        pid = waiting.pop()
        found[pid] = everyone[pid]
        waiting += children.get(pid, ())
    return found


def read_processes(root: Path) -> dict[int, ProcessStat]:
    found = {}
    for name in os.listdir(root / "proc"):
        if name.isdecimal():
            try:
                text = (root / "proc" / name / "stat").read_text(errors="replace")
            except OSError:
                continue  # the process has ended
            # The program name may contain spaces and brackets.
            fields = text.rpartition(")")[2].split()
            if len(fields) < 22:
                continue  # the process has ended
            ticks = sum(int(fields[at]) for at in (11, 12, 13, 14))
            found[int(name)] = ProcessStat(
                int(fields[1]), ticks, threads=int(fields[17]), pages=int(fields[21])
            )
    return found


def cpu_s(processes: Mapping[int, ProcessStat]) -> float:
    return sum(process.ticks for process in processes.values()) / TICKS


@dataclass(frozen=True)
class MemoryUse:
    """The memory of processes. `held_bytes` is what the kernel cannot drop: their own, and shared memory."""

    total_bytes: int = 0
    held_bytes: int = 0


def measure_memory(processes: Mapping[int, ProcessStat], *, root: Path = Path("/")) -> MemoryUse:
    """Return their memory. Shared memory counts once, where the kernel permits reading the proportional size.

    What is mapped and what lies in files in memory is mostly the same, so that only the larger of the two counts.
    """
    total = own = shared = 0
    for pid, process in processes.items():
        here = root / "proc" / str(pid)
        sizes = proportional_bytes(here / "smaps_rollup")
        total += process.pages * PAGE if sizes is None else sizes.get("Pss", 0)
        if sizes is None:  # a process can hide the one, not the other
            sizes = resident_bytes(here / "status")
        own += sizes.get("Pss_Anon", 0)  # since Linux 5.4
        shared += sizes.get("Pss_Shmem", 0)
    return MemoryUse(total, own + max(shared, files_in_memory_bytes(processes, root=root)))


def proportional_bytes(path: Path) -> dict[str, int] | None:
    """Return {} for a process that has just ended; none without permission or on a kernel older than 4.14."""
    try:
        found = re.findall(r"^(Pss\w*):\s+(\d+) kB", path.read_text(errors="replace"), re.MULTILINE)
    except ProcessLookupError:
        return {}
    except FileNotFoundError:
        return None if path.parent.exists() else {}
    except OSError:
        return None
    return {name: int(size) * 1024 for name, size in found}


def resident_bytes(path: Path) -> dict[str, int]:
    """Return the resident sizes of a process in the place of the proportional ones; {} if it has ended."""
    with contextlib.suppress(OSError):
        text = path.read_text(errors="replace")
        found = re.findall(r"^Rss(Anon|Shmem):\s+(\d+) kB", text, re.MULTILINE)
        return {f"Pss_{kind}": int(size) * 1024 for kind, size in found}
    return {}


def files_in_memory_bytes(processes: Iterable[int], *, root: Path = Path("/")) -> int:
    """Return the size of files in memory that are theirs: memfd and removed ones that they keep open, and those in the
    /tmp and /dev/shm that a sandbox has made for them."""
    machine = {device for path in MEMORY_FOLDERS if (device := device_of(path)) is not None}
    opened, folders = dict[tuple[int, int], int](), dict[int, int]()
    for pid in processes:
        here = root / "proc" / str(pid)
        for path in MEMORY_FOLDERS:
            with contextlib.suppress(OSError):
                inside = f"{here}/root{path}"
                if (device := os.stat(inside).st_dev) not in machine | folders.keys():
                    folders[device] = used_bytes(inside)
        with contextlib.suppress(OSError), os.scandir(here / "fd") as entries:
            for each in entries:
                with contextlib.suppress(OSError):
                    file = each.stat()
                    if stat.S_ISREG(file.st_mode) and file.st_nlink == 0 and file.st_dev in memory_devices():
                        opened[file.st_dev, file.st_ino] = file.st_blocks * BLOCK_BYTES
    return sum(opened.values()) + sum(folders.values())


def used_bytes(folder: str) -> int:
    """Return how much a file system in memory holds; 0 for one on a disk."""
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def device_of(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(path).st_dev
    return None


@cache
def memory_devices() -> frozenset[int]:
    """Return the devices of memfd and of the machine's /dev/shm."""
    found = {device_of("/dev/shm")}  # noqa: S108 - the folder of shared memory
    with contextlib.suppress(OSError, AttributeError):
        memory = create_memory_file("device")
        found.add(os.fstat(memory).st_dev)
        os.close(memory)
    return frozenset(device for device in found if device is not None)


def busy_ticks(root: Path = Path("/")) -> int | None:
    """Return the busy time of all CPUs since boot in ticks, without idle and iowait."""
    try:
        line = (root / "proc/stat").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    times = [int(word) for word in line.split()[1:9]]
    return sum(times) - times[3] - times[4]
