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


@dataclass(frozen=True)
class AppliedLimits:
    """The limits of one attempt. `processes` are rlimits of each rank; `descriptions` say how each is enforced."""

    group: AttemptCgroup | None = None
    processes: dict[str, int] = field(default_factory=dict)
    descriptions: tuple[str, ...] = ()


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
    descriptions = [f"{name}: cgroup" for name in CONTROLLERS if name in controllers]
    if launch.memory_bytes is not None and "memory" not in controllers:
        limits["RLIMIT_DATA"] = max(1, launch.memory_bytes // share.processes)
        descriptions.append("memory: each process (RLIMIT_DATA)")
    if "pids" not in controllers:
        if has_own_uid(spec):
            limits["RLIMIT_NPROC"] = max_tasks
            descriptions.append("pids: its uid (RLIMIT_NPROC), and counted")
        else:
            descriptions.append("pids: counted")
    if launch.disk_bytes is not None:
        limits["RLIMIT_FSIZE"] = launch.disk_bytes
        descriptions.append("disk: measured, and each file (RLIMIT_FSIZE)")
    return AppliedLimits(group, limits, tuple(descriptions))


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
            "no cgroup (v2) is configured or delegated: memory is limited per process, and processes are counted",
        )
    return True, f"{', '.join(sorted(parent.controllers))} by cgroups below {parent.path}"
