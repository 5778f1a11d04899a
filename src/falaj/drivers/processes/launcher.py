"""Launches attempts at jobs as processes of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from falaj.drivers.processes.attempt_folder import AttemptFolder, read_json, write_json
from falaj.drivers.processes.attempt_spec import AttemptSpec, SandboxSpec
from falaj.drivers.processes.frameworks.contracts import machine_fault
from falaj.drivers.processes.gpus import check_gpus
from falaj.drivers.processes.limits.cgroup import AttemptCgroup
from falaj.drivers.processes.nsys import find_nsys
from falaj.drivers.processes.supervisor_start import start_supervisor
from falaj.drivers.processes.tree_removal import remove_tree
from falaj.errors import InvalidInput, Unavailable
from falaj.ports.launcher import AttemptState, AttemptUsage, Launch

LOG_LIMIT_BYTES = 256 * 1024 * 1024
NAME_LIMIT = 200
END_TIMEOUT_S = 10


class ProcessLauncher:
    """Runs attempts as local processes. `root` holds the state of each attempt, and user code cannot reach it.

    `sandbox` is called at each start and returns the sandbox to use; it raises IsolationRefused if user code may not
    run. The directories of attempts must lie outside of `root`.
    """

    def __init__(
        self,
        root: Path,
        *,
        sandbox: Callable[[], SandboxSpec],
        log_limit_bytes: int = LOG_LIMIT_BYTES,
        max_tasks: int | None = None,
        reserve_bytes: int | None = None,
        cgroup: Path | None = None,
        lease: Path | None = None,
    ) -> None:
        """`lease` is the file of an `AttemptLease`, without which attempts run until they end."""
        self._root = root.absolute()
        self._sandbox = sandbox
        self._limits = (log_limit_bytes, max_tasks, reserve_bytes, cgroup)
        self._lease = lease

    def start(self, launch: Launch) -> None:
        folder = self._folder(launch.attempt)
        if folder.started.exists() or folder.is_locked():
            return
        check_launch(launch)
        launch = share_machine(launch)
        spec = AttemptSpec(launch, self._sandbox(), *self._limits, nsys=find_nsys(launch), lease=self._lease)
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.path.mkdir(mode=0o700, exist_ok=True)
        write_json(folder.launch, spec.to_json())
        problem = start_supervisor(folder, launch.secrets)
        if problem:
            raise Unavailable(f"{launch.attempt} could not be started: {problem}")

    def state(self, attempt: str) -> AttemptState:
        folder = self._folder(attempt)
        ended = read_json(folder.ended)
        if ended is None and folder.is_locked():
            running = read_json(folder.running)
            if running is None:
                return AttemptState("starting")
            return AttemptState(
                "running", started_at=timestamp(running), limits=tuple(running.get("limits", ()))
            )
        ended = ended or read_json(folder.ended)  # it may have ended between the two reads
        if ended is not None:
            return AttemptState(
                "ended",
                exit_code=ended["exit_code"],
                signal=ended["signal"],
                reason=ended["reason"],
                started_at=timestamp(ended),
                ended_at=timestamp(ended, "ended_at"),
                used=AttemptUsage(**ended["used"]),
                limits=tuple(ended["limits"]),
                stopped=ended["stopped"],
                fenced=ended["fenced"],
            )
        if folder.started.exists():
            started_at, node_restarted = timestamp(read_json(folder.running)), folder.is_from_earlier_boot()
            return AttemptState(
                "lost", reason=folder.explain_loss(), started_at=started_at, node_restarted=node_restarted
            )
        return AttemptState("unknown")

    def stop(self, attempt: str, *, grace_s: float) -> None:
        folder = self._folder(attempt)
        if folder.is_locked() and not folder.ended.exists():
            write_json(folder.stop, {"grace_s": grace_s})

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        try:
            with open(self._folder(attempt).log, "rb") as file:
                file.seek(offset)
                return file.read(limit)
        except FileNotFoundError:
            return b""

    def delete(self, attempt: str) -> None:
        folder = self._folder(attempt)
        self.stop(attempt, grace_s=0)
        deadline = time.monotonic() + END_TIMEOUT_S
        while folder.is_locked():
            if time.monotonic() > deadline:
                raise Unavailable(f"{attempt} did not end within {END_TIMEOUT_S} s after SIGKILL")
            time.sleep(0.01)
        cgroup = read_json(folder.cgroup)
        if cgroup is not None:
            AttemptCgroup(Path(cgroup["path"])).remove()
        spec = read_json(folder.launch)
        if spec is not None:
            remove_tree(Path(spec["launch"]["directory"]))
        remove_tree(folder.path)

    def _folder(self, attempt: str) -> AttemptFolder:
        name = quote(attempt, safe="")
        if not name.strip(".") or len(name) > NAME_LIMIT:
            allowed = f"1 to {NAME_LIMIT} characters, and not only dots"
            raise InvalidInput.at("attempt", given=attempt, allowed=allowed)
        return AttemptFolder(self._root / name)


def share_machine(launch: Launch) -> Launch:
    """Return a launch without peers as one of a single node, with the processes and the resources of all its nodes."""
    if launch.peers or launch.nodes == 1:
        return launch
    amounts = ("processes", "processes_min", "cpus", "memory_bytes", "disk_bytes")
    given = {name: getattr(launch, name) for name in amounts}
    return replace(launch, nodes=1, **{name: each and each * launch.nodes for name, each in given.items()})


def check_launch(launch: Launch) -> None:
    """Raise InvalidInput for a launch that could never run."""
    check_gpus(launch)
    if not launch.command:
        raise InvalidInput.at("command", given="nothing", allowed="a program and its arguments")
    for count in ("nodes", "processes"):
        if getattr(launch, count) < 1:
            raise InvalidInput.at(count, given=getattr(launch, count), allowed="1 or more")
    check_nodes(launch)
    if not (launch.directory / "code").is_dir():
        raise InvalidInput.at(
            str(launch.directory), given="no folder code/ in it", allowed="a folder that holds code/"
        )
    for name, value in {**launch.environment, **launch.secrets}.items():
        if not name or "=" in name or "\0" in name + value:
            allowed = "a name without '=', and a value without NUL"
            raise InvalidInput.at(
                f"environment[{name!r}]", given="a value that is not shown", allowed=allowed
            )
    for limit in ("disk_bytes", "hang_s", "memory_bytes", "timeout_s"):
        given = getattr(launch, limit)
        if given is not None and given <= 0:
            raise InvalidInput.at(limit, given=given, allowed="more than 0")


def check_nodes(launch: Launch) -> None:
    """Raise InvalidInput for a launch that could not be one of several nodes."""
    if launch.peers and len(launch.peers) != launch.nodes:
        raise InvalidInput.at(
            "peers",
            given=f"{len(launch.peers)} addresses",
            allowed=f"none, or one for each of {launch.nodes} nodes",
        )
    if not 0 <= launch.node_rank < max(1, len(launch.peers)):
        allowed = f"0 to {len(launch.peers) - 1}" if launch.peers else "0 without peers"
        raise InvalidInput.at("node_rank", given=launch.node_rank, allowed=allowed)
    if (fault := machine_fault(launch)) is not None:
        raise InvalidInput.at(
            "framework",
            given=f"{launch.framework} on {len(launch.peers)} machines",
            allowed=f"{launch.framework} on one machine: {fault}",
            fix="nodes that fit on one machine, or another framework",
        )


def timestamp(found: dict[str, Any] | None, name: str = "started_at") -> datetime | None:
    return None if found is None else datetime.fromtimestamp(found[name], UTC)
