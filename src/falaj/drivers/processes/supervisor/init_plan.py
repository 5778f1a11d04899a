"""Makes the order of an attempt into a command for the sandbox: the first process inside, and its plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from falaj.drivers.processes.attempt_spec import AttemptSpec
from falaj.drivers.processes.diagnosis import heartbeats
from falaj.drivers.processes.frameworks.contracts import tolerated_losses
from falaj.drivers.processes.gpus import gpu_devices, gpu_folders
from falaj.drivers.processes.limits.enforcement import AppliedLimits
from falaj.drivers.processes.nsys import NVTX_ENVIRONMENT, nsys_folders
from falaj.drivers.processes.sandbox_init import init, stack_dump_hook
from falaj.drivers.processes.supervisor.init_channel import SOCKET
from falaj.ports.launcher import Launch
from falaj.ports.sandbox import UserCode
from falaj.records.no_telemetry import NO_TELEMETRY

PLAN_FILE = ".falaj-plan"
"""In the attempt's directory, which is handed to user code only afterwards."""


def build_user_code(
    spec: AttemptSpec, ranks: Sequence[Mapping[str, Any]], limits: AppliedLimits, *, control: Path
) -> UserCode:
    """The first process inside, which finds what to run in a file: one argument may have 128 KiB only."""
    launch, directory = spec.launch, spec.launch.directory.absolute()
    plan = {
        "socket": SOCKET,
        "folder": str(directory / "code"),
        "ranks": list(ranks),
        "is_launcher": len(ranks) < launch.processes,
        "is_limited": limits.group is not None,
        "limits": limits.processes,
        "heartbeat": str(directory / heartbeats.FOLDER),
        "tolerated_losses": tolerated_losses(launch),
        "grace_s": launch.grace_s,
    }
    written = directory / PLAN_FILE
    written.write_text(json.dumps(plan), encoding="utf-8")
    text = Path(init.__file__).read_text(encoding="utf-8")
    return UserCode(
        command=[spec.sandbox.facts.python, "-I", "-S", "-c", text, str(written)],
        directory=launch.directory,
        environment=build_environment(launch),
        readable=[*launch.readable, *gpu_folders(launch), *nsys_folders(spec.nsys)],
        hidden=[*launch.hidden, control],
        network=launch.network,
        loopback=launch.processes > 1 or launch.framework != "plain",
        devices=gpu_devices(launch),
        # A file system in memory is no process's own, and escapes the limits of processes.
        scratch_bytes=min(filter(None, [launch.disk_bytes, launch.memory_bytes]), default=None),
        shared_memory_bytes=launch.memory_bytes,
    )


def build_environment(launch: Launch) -> dict[str, str]:
    """The environment of all ranks, secrets included: it is handed on in memory."""
    told = replace(launch, environment={**launch.environment, **launch.secrets})
    found = (
        NO_TELEMETRY
        | {"PYTHONFAULTHANDLER": "1"}
        | shared_environment(told)
        | (NVTX_ENVIRONMENT if launch.nsys else {})
    )
    if launch.hang_s is None:
        return found
    hook = Path(stack_dump_hook.__file__).read_text(encoding="utf-8")
    folder = str(heartbeats.prepare_folder(launch.directory.absolute(), hook))
    path = ":".join(filter(None, [folder, found.get("PYTHONPATH")]))
    return found | {heartbeats.VARIABLE: folder, "PYTHONPATH": path}
