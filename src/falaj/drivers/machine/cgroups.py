"""The limits that a container or a service puts on this process: cgroup v2, where it is set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOUNT = "sys/fs/cgroup"


def cpu_limit(root: Path) -> float | None:
    """CPUs' worth of time, the least of all levels; none: no limit."""
    shares = []
    for text in settings(root, "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota != "max":
            shares.append(int(quota) / int(period or 100_000))
    return min(shares, default=None)


def memory_limit_bytes(root: Path) -> int | None:
    return min((int(text) for text in settings(root, "memory.max") if text != "max"), default=None)


def settings(root: Path, name: str) -> Iterator[str]:
    """What `name` says in this process's group and in each group above it; a limit above binds too."""
    own = own_group(root)
    for group in (own, *own.parents):
        try:
            text = (root / MOUNT / group / name).read_text().strip()
        except OSError:
            continue  # the root group has no limits, and v1 has no such files
        if text:
            yield text


def own_group(root: Path) -> PurePosixPath:
    """Relative to the mount; the mount itself where a container sees a group that lies outside of it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return PurePosixPath()
    paths = [PurePosixPath(line[4:]) for line in lines if line.startswith("0::/")]
    return paths[0] if paths and ".." not in paths[0].parts else PurePosixPath()
