"""The CPUs and the memory of a machine, and the cgroup limits on them."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from falaj.drivers.machine.kernel_files import list_entries, read_text

ISA_FLAGS = {
    # name in /proc/cpuinfo: common name
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx512_vnni": "vnni",
    "avx_vnni": "vnni",
    "amx_tile": "amx",
    "asimd": "neon",
    "sve": "sve",
}

CGROUP_MOUNT = "sys/fs/cgroup"


def affinity() -> int:
    """Return the number of CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(root: Path) -> int:
    """Return the physical memory, from /proc/meminfo or, on other systems, from the C library."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    if found:
        return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_facts(root: Path) -> tuple[str, frozenset[str]]:
    """Return the CPU's model and its instruction sets."""
    text = read_text(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = flags[1].split() if flags else []
    return (
        model[1].strip() if model else platform.processor() or platform.machine(),
        frozenset(ISA_FLAGS[flag] for flag in known if flag in ISA_FLAGS),
    )


def sockets(root: Path) -> int | None:
    """Return the number of CPU sockets; none if it is unknown."""
    found = {
        read_text(cpu / "topology/physical_package_id")
        for cpu in list_entries(root / "sys/devices/system/cpu")
        if re.fullmatch(r"cpu\d+", cpu.name)
    }
    return len(found - {"", "-1"}) or None


def numa_nodes(root: Path) -> int | None:
    """Return the number of NUMA nodes; none if it is unknown."""
    found = [
        each for each in list_entries(root / "sys/devices/system/node") if re.fullmatch(r"node\d+", each.name)
    ]
    return len(found) or None


def cpu_limit(root: Path) -> float | None:
    """Return the CPU quota of our cgroup in CPUs, the smallest of all levels; none if there is no limit."""
    shares = []
    for text in settings(root, "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota != "max":
            shares.append(int(quota) / int(period or 100_000))
    return min(shares, default=None)


def memory_limit_bytes(root: Path) -> int | None:
    return min((int(text) for text in settings(root, "memory.max") if text != "max"), default=None)


def settings(root: Path, name: str) -> Iterator[str]:
    """Yield the setting `name` of our cgroup and of each ancestor, whose limits apply too."""
    own = own_group(root)
    for group in (own, *own.parents):
        try:
            text = (root / CGROUP_MOUNT / group / name).read_text().strip()
        except OSError:
            continue  # the root cgroup has no limits, and cgroup v1 has no such files
        if text:
            yield text


def own_group(root: Path) -> PurePosixPath:
    """Return our cgroup relative to the mount; the mount itself if a container shows a path outside of it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return PurePosixPath()
    paths = [PurePosixPath(line[4:]) for line in lines if line.startswith("0::/")]
    return paths[0] if paths and ".." not in paths[0].parts else PurePosixPath()
