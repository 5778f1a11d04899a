"""The instructions of the launcher to the supervisor, as JSON: the launch, its sandbox and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from falaj.ports.launcher import Launch
from falaj.ports.sandbox import MachineFacts, Mechanism


@dataclass(frozen=True)
class SandboxSpec:
    """Which sandbox to use, and the facts that another process needs to build it."""

    mechanism: Mechanism
    facts: MachineFacts


@dataclass(frozen=True)
class AttemptSpec:
    """One attempt, for its supervisor. The JSON leaves secrets out.

    `max_tasks` limits its processes and threads, `reserve_bytes` is the free space that its volume must keep, and
    `cgroup` is the parent of the cgroups of attempts; none stands for the default. `nsys` is the path of Nsight Systems
    if the launch requests it. `lease` is the file of an `AttemptLease`, if the attempt must stop without renewal.
    """

    launch: Launch
    sandbox: SandboxSpec
    log_limit_bytes: int
    max_tasks: int | None = None
    reserve_bytes: int | None = None
    cgroup: Path | None = None
    nsys: str | None = None
    lease: Path | None = None

    def to_json(self) -> dict[str, Any]:
        launch = asdict(self.launch)
        for name in ("secrets", "open_placement", "volumes"):  # a supervisor needs none of them
            del launch[name]
        launch["directory"] = str(self.launch.directory)
        launch["environment"] = dict(self.launch.environment)
        launch["labels"] = dict(self.launch.labels)
        for paths in ("readable", "hidden"):
            launch[paths] = [str(path) for path in launch[paths]]
        uids = self.sandbox.facts.spare_uids
        facts = asdict(self.sandbox.facts) | {"spare_uids": [uids.start, uids.stop]}
        sandbox = {"mechanism": self.sandbox.mechanism, "facts": facts}
        return {
            "launch": launch,
            "sandbox": sandbox,
            "log_limit_bytes": self.log_limit_bytes,
            "max_tasks": self.max_tasks,
            "reserve_bytes": self.reserve_bytes,
            "cgroup": None if self.cgroup is None else str(self.cgroup),
            "nsys": self.nsys,
            "lease": None if self.lease is None else str(self.lease),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> AttemptSpec:
        launch = dict(found["launch"])
        launch["directory"] = Path(launch["directory"])
        launch["gpus"] = tuple(launch["gpus"])
        for names in ("peers", "hosts"):
            launch[names] = tuple(launch.get(names, ()))
        for paths in ("readable", "hidden"):
            launch[paths] = [Path(path) for path in launch[paths]]
        facts = dict(found["sandbox"]["facts"])
        facts["spare_uids"] = range(*facts["spare_uids"])
        sandbox = SandboxSpec(found["sandbox"]["mechanism"], MachineFacts(**facts))
        limits = {name: found.get(name) for name in ("max_tasks", "reserve_bytes")}
        cgroup, lease = (
            None if found.get(name) is None else Path(found[name]) for name in ("cgroup", "lease")
        )
        return cls(
            Launch(**launch),
            sandbox,
            found["log_limit_bytes"],
            **limits,
            cgroup=cgroup,
            lease=lease,
            nsys=found.get("nsys"),
        )
