"""Applies the limits of an attempt: by a cgroup of its own, or else by resource limits of each process."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from falaj.drivers.processes.attempt_folder import AttemptFolder, write_json
from falaj.drivers.processes.attempt_spec import AttemptSpec
from falaj.drivers.processes.limits.cgroup import (
    CONTROLLERS,
    AttemptCgroup,
    CgroupLimits,
    CgroupParent,
    find_parent,
)
from falaj.drivers.processes.limits.tasks import count_machine_tasks
from falaj.records.sizes import format_size


@dataclass(frozen=True)
class AppliedLimits:
    """The limits of one attempt. `processes` are rlimits of each rank; `descriptions` say how each is enforced."""

    group: AttemptCgroup | None = None
    processes: dict[str, int] = field(default_factory=dict)
    descriptions: tuple[str, ...] = ()
    counted_memory_bytes: int | None = None
    """The memory limit where no cgroup enforces it: processes are limited one by one, and counted together."""

    def memory_fault(self, held_bytes: int) -> str | None:
        """Return why the attempt must end; none if it is within its memory, or a cgroup enforces that."""
        if self.counted_memory_bytes is None or held_bytes <= self.counted_memory_bytes:
            return None
        held = f"{format_size(held_bytes)} of {format_size(self.counted_memory_bytes)}"
        return f"it used more memory than it may: {held}, shared memory included"


def apply_limits(folder: AttemptFolder, spec: AttemptSpec, *, ranks: int, max_tasks: int) -> AppliedLimits:
    """Create the cgroup of an attempt if possible, and return its limits. To be called before it starts."""
    launch, parent = spec.launch, find_parent(spec.cgroup)
    share = CgroupLimits(launch.memory_bytes, max(launch.processes, ranks), ranks, launch.cpus, max_tasks)
    group, controllers = None, frozenset[str]()
    if parent is not None:
        with contextlib.suppress(OSError):
            group = create_cgroup(folder, parent, launch.attempt, share)
            controllers = parent.controllers
    limits = dict[str, int]()
    amounts = {"memory": "" if launch.memory_bytes is None else f"{format_size(launch.memory_bytes)} by "}
    descriptions = [f"{name}: {amounts.get(name, '')}cgroup" for name in CONTROLLERS if name in controllers]
    is_counted = launch.memory_bytes is not None and "memory" not in controllers
    if launch.memory_bytes is not None and is_counted:
        limits["RLIMIT_DATA"] = max(1, launch.memory_bytes // share.processes)
        descriptions.append(
            f"memory: {format_size(launch.memory_bytes)}, {format_size(limits['RLIMIT_DATA'])} for each process "
            "(RLIMIT_DATA); shared mappings and memfd are not refused, only counted about once a second"
        )
    if "pids" not in controllers:
        if has_own_uid(spec):
            limits["RLIMIT_NPROC"] = max_tasks
            descriptions.append("pids: its uid (RLIMIT_NPROC), and counted")
        elif not spec.sandbox.facts.is_root:
            # The kernel counts all tasks of the user. Counting alone loses the race against a fork bomb.
            limits["RLIMIT_NPROC"] = count_machine_tasks(Path("/")) + 2 * max_tasks
            descriptions.append("pids: counted, and the platform's user has a limit (RLIMIT_NPROC)")
        else:
            descriptions.append("pids: counted")
    if launch.disk_bytes is not None:
        limits["RLIMIT_FSIZE"] = launch.disk_bytes
        descriptions.append(
            f"disk: {format_size(launch.disk_bytes)}, measured, and for each file (RLIMIT_FSIZE)"
        )
    counted = launch.memory_bytes if is_counted else None
    return AppliedLimits(group, limits, tuple(descriptions), counted)


def create_cgroup(
    folder: AttemptFolder, parent: CgroupParent, attempt: str, share: CgroupLimits
) -> AttemptCgroup:
    group = AttemptCgroup.named(parent, f"{os.fspath(folder.path)}/{attempt}")
    write_json(folder.cgroup, {"path": str(group.path)})
    group.make(share, parent.controllers)
    return group


def has_own_uid(spec: AttemptSpec) -> bool:
    """Return whether the attempt has a uid of its own, for which the kernel counts processes."""
    facts, mechanism = spec.sandbox.facts, spec.sandbox.mechanism
    changes_uid = mechanism in ("bubblewrap", "uid") or (mechanism == "landlock" and facts.landlock_own_uid)
    return changes_uid and facts.is_root and len(facts.spare_uids) > 1


def describe_enforcement(cgroup: Path | None) -> tuple[bool, str]:
    """Return for the doctor whether cgroups limit attempts here, and how limits are enforced."""
    parent = find_parent(cgroup)
    if parent is None:
        return (
            False,
            "no cgroup (v2) is configured or delegated: memory is limited per process, and shared memory and "
            "processes are counted",
        )
    return True, f"{', '.join(sorted(parent.controllers))} by cgroups below {parent.path}"
