"""The CPUs and the memory of a machine, from what the kernel tells of them."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from falaj.drivers.machine.kernel_files import list_entries, read_text

ISA_FLAGS = {
    # as the kernel spells it: as engineers do
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx512_vnni": "vnni",
    "avx_vnni": "vnni",
    "amx_tile": "amx",
    "asimd": "neon",
    "sve": "sve",
}


def affinity() -> int:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(root: Path) -> int:
    """Physical memory: from the kernel's own words, or, where it is not Linux, from the C library."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    if found:
        return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_facts(root: Path) -> tuple[str, frozenset[str]]:
    """The CPU's model and its instruction sets."""
    text = read_text(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = flags[1].split() if flags else []
    return (
        model[1].strip() if model else platform.processor() or platform.machine(),
        frozenset(ISA_FLAGS[flag] for flag in known if flag in ISA_FLAGS),
    )


def sockets(root: Path) -> int | None:
    """How many packages of CPUs there are; none: the kernel does not say."""
    found = {
        read_text(cpu / "topology/physical_package_id")
        for cpu in list_entries(root / "sys/devices/system/cpu")
        if re.fullmatch(r"cpu\d+", cpu.name)
    }
    return len(found - {"", "-1"}) or None


def numa_nodes(root: Path) -> int | None:
    """How many parts of the memory are nearer to some CPUs than to others; none: the kernel does not say."""
    found = [
        each for each in list_entries(root / "sys/devices/system/node") if re.fullmatch(r"node\d+", each.name)
    ]
    return len(found) or None
