"""The processes that a process has started: the CPU time they took, their threads, and the memory they hold."""

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
    """From /proc/PID/stat; `ticks` are its own and those of its children that have ended and were waited for."""

    parent: int
    ticks: int
    threads: int
    pages: int


def descendants(top: int, *, root: Path = Path("/")) -> dict[int, ProcessStat]:
    """All descendants of `top` that live now."""
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
                continue  # it has ended
            # The name of the program may hold spaces and brackets.
            told = text.rpartition(")")[2].split()
            if len(told) < 22:
                continue  # likewise
            ticks = sum(int(told[at]) for at in (11, 12, 13, 14))
            found[int(name)] = ProcessStat(int(told[1]), ticks, threads=int(told[17]), pages=int(told[21]))
    return found


def cpu_s(processes: Mapping[int, ProcessStat]) -> float:
    return sum(process.ticks for process in processes.values()) / TICKS


def memory_bytes(processes: Mapping[int, ProcessStat], *, root: Path = Path("/")) -> int:
    """What they hold together. Memory that several share counts once, where we may look that closely."""
    total = 0
    for pid, process in processes.items():
        share = proportional_bytes(root / "proc" / str(pid) / "smaps_rollup")
        total += process.pages * PAGE if share is None else share
    return total


def proportional_bytes(path: Path) -> int | None:
    """Nothing for a process that has just ended; none where we may not look, or the kernel is older than 4.14."""
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
    """What all CPUs of the machine have worked since it started: all but idling and waiting for disks."""
    try:
        line = (root / "proc/stat").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    told = [int(word) for word in line.split()[1:9]]
    return sum(told) - told[3] - told[4]
