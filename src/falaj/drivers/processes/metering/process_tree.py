"""The descendants of a process from /proc: their CPU time, threads and memory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


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


def memory_bytes(processes: Mapping[int, ProcessStat], *, root: Path = Path("/")) -> int:
    """Return their memory. Shared memory counts once, where the kernel permits reading the proportional size."""
    total = 0
    for pid, process in processes.items():
        share = proportional_bytes(root / "proc" / str(pid) / "smaps_rollup")
        total += process.pages * PAGE if share is None else share
    return total


def proportional_bytes(path: Path) -> int | None:
    """Return 0 for a process that has just ended; none without permission or on a kernel older than 4.14."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", path.read_text(errors="replace"), re.MULTILINE)
    except ProcessLookupError:
        return 0
    except FileNotFoundError:
        return None if path.parent.exists() else 0
    except OSError:
        return None
    return int(found[1]) * 1024 if found else 0


def busy_ticks(root: Path = Path("/")) -> int | None:
    """Return the busy time of all CPUs since boot in ticks, without idle and iowait."""
    try:
        line = (root / "proc/stat").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    times = [int(word) for word in line.split()[1:9]]
    return sum(times) - times[3] - times[4]
