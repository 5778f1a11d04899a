"""Memory sizes: the memory that a process may use, and sizes as text."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

USABLE = 0.92
"""The rest is for the CUDA context, or the interpreter and its libraries, and for fragmentation."""

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_memory(device: torch.device) -> int:
    """Return the bytes that this process may use on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return round(USABLE * (free + torch.cuda.memory_reserved(device)))
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1")
    return round(USABLE * machine_memory() / max(1, local))


def machine_memory() -> int:
    """Return the memory of this machine, or the limit of the control group if that is less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in (*_own_limits(), *CGROUP_LIMITS):
        with suppress(OSError, ValueError):
            found.append(int(Path(path).read_text()))
    return min(found)


def _own_limits() -> list[str]:
    """Return the limit files of the control groups around this process, innermost first."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                parts = line.removeprefix("0::/").split("/")
                folders = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
                return [f"/sys/fs/cgroup/{folder}/memory.max" for folder in folders if folder]
    return []


def format_bytes(size: int) -> str:
    """Return a size with three digits and its unit, such as 10.6 GiB, 512 MiB or 3 KiB."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:.0f} {name}"
    return f"{size} bytes"
