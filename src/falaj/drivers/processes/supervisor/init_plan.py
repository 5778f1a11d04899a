"""Builds the command for the sandbox: the init process, and the plan of the ranks that it starts."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from falaj.drivers.processes.attempt_spec import AttemptSpec
from falaj.drivers.processes.diagnosis import heartbeats
from falaj.drivers.processes.frameworks.contracts import default_environment, plan_processes, tolerated_losses
from falaj.drivers.processes.frameworks.process import LOOPBACK, PortAllocator
from falaj.drivers.processes.gpus import gpu_devices, gpu_environment, gpu_folders
from falaj.drivers.processes.limits.enforcement import AppliedLimits
from falaj.drivers.processes.nsys import NVTX_ENVIRONMENT, nsys_folders
from falaj.drivers.processes.sandbox_init import init, stack_dump_hook
from falaj.drivers.processes.supervisor.init_channel import SOCKET
from falaj.ports.launcher import Launch
from falaj.ports.sandbox import UserCode
from falaj.records.no_telemetry import NO_TELEMETRY

PLAN_FILE = ".falaj-plan"
"""In the attempt's directory, before that is given to user code."""


def build_user_code(
    spec: AttemptSpec, ranks: Sequence[Mapping[str, Any]], limits: AppliedLimits, *, control: Path
) -> UserCode:
    """Return the init process and its sandbox. Its plan is a file, since one argument is limited to 128 KiB."""
    launch, directory = spec.launch, spec.launch.directory.absolute()
    plan = {
        "socket": SOCKET,
        "folder": str(directory / "code"),
        "ranks": list(ranks),
        "is_launcher": len(ranks) < launch.processes or launch.node_rank > 0,
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
        network=launch.network or bool(launch.peers),
        loopback=launch.processes > 1 or launch.framework != "plain",
        devices=gpu_devices(launch),
        # Limits of processes do not count a file system in memory.
        scratch_bytes=min(filter(None, [launch.disk_bytes, launch.memory_bytes]), default=None),
        shared_memory_bytes=launch.memory_bytes,
    )


def build_environment(launch: Launch) -> dict[str, str]:
    """Return the environment of all ranks, secrets included: it is passed in memory."""
    whole = replace(launch, environment={**launch.environment, **launch.secrets})
    found = (
        NO_TELEMETRY
        | {"PYTHONFAULTHANDLER": "1"}
        | shared_environment(whole)
        | (NVTX_ENVIRONMENT if launch.nsys else {})
    )
    if launch.hang_s is None:
        return found
    hook = Path(stack_dump_hook.__file__).read_text(encoding="utf-8")
    folder = str(heartbeats.prepare_folder(launch.directory.absolute(), hook))
    path = ":".join(filter(None, [folder, found.get("PYTHONPATH")]))
    return found | {heartbeats.VARIABLE: folder, "PYTHONPATH": path}


def free_ports(count: int) -> list[int]:
    """Return ports that are free now. A job without the network has a loopback of its own, where all are free. On a
    shared loopback another process can take one first, and the framework then reports it."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def plan_ranks(launch: Launch, ports: PortAllocator = free_ports) -> list[dict[str, Any]]:
    """Return the plan of each process: its command, its own variables, its name, and whether it is essential."""
    return [
        {
            "command": list(each.command),
            "environment": dict(each.environment),
            "name": each.name,
            "is_essential": each.is_essential,
        }
        for each in plan_processes(launch, ports)
    ]


def shared_environment(launch: Launch) -> dict[str, str]:
    """Return the environment that all processes share. The launch overrides it, except for the GPUs."""
    threads = str(max(1, launch.cpus // max(1, launch.processes)))
    # joblib would use all cores of the machine.
    decided = {"OMP_NUM_THREADS": threads, "LOKY_MAX_CPU_COUNT": threads, "PYTHONUNBUFFERED": "1"}
    return decided | default_environment(launch) | dict(launch.environment) | gpu_environment(launch)
