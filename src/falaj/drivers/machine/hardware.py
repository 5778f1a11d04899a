"""Finds out what this machine offers to jobs."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

from falaj.drivers.machine.cgroups import cpu_limit, memory_limit_bytes
from falaj.drivers.machine.nvml import find_gpus
from falaj.ports.hardware import NodeFacts
from falaj.records.scheduling import Gpu

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


class ThisMachine:
    """The one machine that the platform runs on. Tests hand in a recorded `root`, CPU count and GPUs."""

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        name: str | None = None,
        usable_cpus: int | None = None,
        gpus: Callable[[], tuple[tuple[Gpu, ...], str]] = find_gpus,
    ) -> None:
        self._root = root
        self._name = name or node_name(platform.node())
        self._usable_cpus = usable_cpus
        self._gpus = gpus

    def nodes(self) -> list[NodeFacts]:
        gpus, fault = self._gpus()
        cpus = self._usable_cpus or affinity()
        share = cpu_limit(self._root)
        memory = memory_bytes(self._root)
        bound = memory_limit_bytes(self._root)
        model, isa = cpu_facts(self._root)
        return [
            NodeFacts(
                name=self._name,
                cpus=cpus if share is None else max(1, min(cpus, int(share))),
                memory_bytes=memory if bound is None else min(memory, bound),
                cpu_model=model,
                isa=isa,
                gpus=gpus,
                gpu_fault=fault,
            )
        ]


def node_name(host: str) -> str:
    """The host's name, spelled as names are here."""
    return re.sub(r"[^a-z0-9]+", "-", host.lower()).strip("-")[:128] or "this-machine"


def affinity() -> int:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(root: Path) -> int:
    """Physical memory: from the kernel's own words, or, where it is not Linux, from the C library."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", read(root / "proc/meminfo"), re.MULTILINE)
    if found:
        return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_facts(root: Path) -> tuple[str, frozenset[str]]:
    """The CPU's model and its instruction sets."""
    text = read(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = flags[1].split() if flags else []
    return (
        model[1].strip() if model else platform.processor() or platform.machine(),
        frozenset(ISA_FLAGS[flag] for flag in known if flag in ISA_FLAGS),
    )


def read(path: Path) -> str:
    """The file's text; nothing where there is no such file."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
