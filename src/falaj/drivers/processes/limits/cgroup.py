"""Limits an attempt by a cgroup of its own (version 2), where the platform may create one.

    PARENT/falaj-…            memory.max, pids.max, cpu.weight of the whole attempt
        init                  the init process
        rank-0, rank-1, …     one rank and its descendants: OOM kills are counted per rank

PARENT is a cgroup that an administrator has configured for jobs, or one that systemd has delegated to the platform
(Delegate=yes with DelegateSubgroup=). It has controllers to enable and no processes of its own, as the kernel requires.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from falaj.drivers.machine.kernel_files import read_text

CONTROLLERS = ("memory", "pids", "cpu")
INIT_LEAF = "init"
LEAF_NAME = re.compile(r"init|rank-\d{1,6}")
DELEGATION_ATTRIBUTES = ("user.delegate", "trusted.delegate")
REMOVE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class CgroupLimits:
    """The limits of a whole attempt.

    `ranks` is the number of processes that the init process starts, `processes` the number of the user's processes.
    """

    memory_bytes: int | None
    processes: int
    ranks: int
    cpus: int
    tasks: int


@dataclass(frozen=True)
class CgroupParent:
    """A cgroup in which we may create others, and the controllers that those have."""

    path: Path
    controllers: frozenset[str]


def find_parent(
    named: Path | None = None,
    *,
    mountinfo: Path = Path("/proc/self/mountinfo"),
    own: Path = Path("/proc/self/cgroup"),
) -> CgroupParent | None:
    """Return the configured cgroup, or else the nearest delegated ancestor of our own; none if there is none.

    Other cgroups are left alone, even if writable: they belong to other software.
    """
    path = named or find_delegated(mountinfo, own)
    controllers = usable_controllers(path) if path is not None else frozenset[str]()
    return CgroupParent(path, controllers) if path is not None and controllers else None


def find_delegated(mountinfo: Path, own: Path) -> Path | None:
    """Return our own cgroup or its nearest ancestor that systemd has marked as delegated."""
    mounted, here = mount_point(mountinfo), own_path(own)
    if mounted is None or here is None:
        return None
    start = mounted / here.lstrip("/")
    return next((path for path in (start, *start.parents) if path != mounted and is_delegated(path)), None)


def is_delegated(path: Path) -> bool:
    for name in DELEGATION_ATTRIBUTES:
        with contextlib.suppress(OSError, AttributeError):  # no such attribute, or not Linux
            if os.getxattr(path, name) == b"1":
                return True
    return False


def mount_point(mountinfo: Path) -> Path | None:
    """Return the mount point of cgroup version 2."""
    with contextlib.suppress(OSError):
        for line in mountinfo.read_text().splitlines():
            before, _, after = line.partition(" - ")
            if after.startswith("cgroup2 "):
                return Path(before.split()[4].replace("\\040", " "))
    return None


def own_path(own: Path) -> str | None:
    with contextlib.suppress(OSError):
        return next((line[3:] for line in own.read_text().splitlines() if line.startswith("0::")), None)
    return None


def usable_controllers(path: Path) -> frozenset[str]:
    """Return which of `CONTROLLERS` children of `path` have, after enabling them; empty if it is not writable."""
    if not all(os.access(path / name, os.W_OK) for name in ("", "cgroup.procs", "cgroup.subtree_control")):
        return frozenset()
    available, enabled = (
        set(read_text(path / f"cgroup.{name}").split()) for name in ("controllers", "subtree_control")
    )
    for controller in (name for name in CONTROLLERS if name in available - enabled):
        with contextlib.suppress(OSError):  # it has processes of its own, or is not writable
            (path / "cgroup.subtree_control").write_text(f"+{controller}")
            enabled.add(controller)
    return frozenset(enabled & set(CONTROLLERS))


@dataclass(frozen=True)
class AttemptCgroup:
    """The cgroup of one attempt."""

    path: Path

    @classmethod
    def named(cls, parent: CgroupParent, name: str) -> AttemptCgroup:
        return cls(parent.path / f"falaj-{hashlib.sha256(name.encode()).hexdigest()[:20]}")

    def make(self, share: CgroupLimits, controllers: frozenset[str]) -> None:
        """Create the cgroup. Raise OSError, and leave nothing behind, if that is not possible."""
        self.remove()  # left by a supervisor that was killed
        self.path.mkdir()
        try:
            self._limit(share, controllers)
            self._try_to_enter()
        except OSError:
            self.remove()
            raise

    def _limit(self, share: CgroupLimits, controllers: frozenset[str]) -> None:
        settings = {"pids.max": share.tasks, "cpu.weight": min(10_000, max(1, 100 * share.cpus))}
        if share.memory_bytes is not None:
            settings |= {"memory.max": share.memory_bytes, "memory.swap.max": 0}
        write_settings(self.path, settings, controllers)
        inherited = [name for name in ("memory",) if name in controllers]
        if inherited:
            (self.path / "cgroup.subtree_control").write_text(f"+{inherited[0]}")
        (self.path / INIT_LEAF).mkdir()
        # One process per rank: it dies with its descendants. A launcher of several ranks reports by itself which died.
        alone = {"memory.oom.group": 1} if share.ranks == share.processes else {}
        for rank in range(share.ranks):
            leaf = self.path / f"rank-{rank}"
            leaf.mkdir()
            write_settings(leaf, alone, controllers)

    def _try_to_enter(self) -> None:
        """Move a short-lived process here, since the permission depends on where it comes from. Raise OSError."""
        trial = os.fork()
        if trial == 0:
            time.sleep(REMOVE_TIMEOUT_S)  # it ends by itself if we are killed
            os._exit(0)
        try:
            self.enter(trial)
        finally:
            os.kill(trial, signal.SIGKILL)
            os.waitpid(trial, 0)

    def enter(self, pid: int, leaf: str = INIT_LEAF) -> None:
        """Move a process there; its later children belong there. Invalid names are ignored: user code may send them."""
        if LEAF_NAME.fullmatch(leaf) is None:
            return
        (self.path / leaf / "cgroup.procs").write_text(str(pid))

    def oom_killed(self) -> list[int]:
        """Return the ranks in which the kernel has killed a process for lack of memory."""
        return [
            int(leaf.name.removeprefix("rank-"))
            for leaf in sorted(self.path.glob("rank-*"))
            if read_events(leaf / "memory.events").get("oom_kill")
        ]

    def refused_tasks(self) -> int:
        """Return how often the creation of a process or thread was refused."""
        return read_events(self.path / "pids.events").get("max", 0)

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # since Linux 5.14
            (self.path / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        """Kill its processes and remove it. Without effect if it does not exist."""
        deadline = time.monotonic() + REMOVE_TIMEOUT_S
        while self.path.is_dir():
            self.kill()
            with contextlib.suppress(OSError):
                for leaf in [path for path in self.path.iterdir() if path.is_dir()]:
                    leaf.rmdir()
                self.path.rmdir()
                return
            if time.monotonic() > deadline:
                return  # SIGKILL does not end a process that waits for a device
            time.sleep(0.005)


def write_settings(path: Path, settings: Mapping[str, int], controllers: Iterable[str]) -> None:
    """Write the settings of available controllers. A kernel may lack some files."""
    for name, value in settings.items():
        if name.partition(".")[0] in controllers:
            try:
                (path / name).write_text(str(value))
            except OSError:
                if (path / name).exists():
                    raise


def read_events(path: Path) -> dict[str, int]:
    pairs = [line.split() for line in read_text(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
