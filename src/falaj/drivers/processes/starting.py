"""Makes the order of an attempt into a command for the sandbox: the first process inside, and its plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from falaj.drivers.processes import hang, inside, stacks_hook
from falaj.drivers.processes.frameworks import tolerates
from falaj.drivers.processes.gpus import gpu_devices, gpu_folders
from falaj.drivers.processes.limits import Limits
from falaj.drivers.processes.nsys import VARIABLE, nsys_folders
from falaj.drivers.processes.order import Order
from falaj.drivers.processes.ranks import environment
from falaj.drivers.processes.talk import SOCKET
from falaj.ports.launcher import Launch
from falaj.ports.sandbox import UserCode
from falaj.records.no_telemetry import NO_TELEMETRY

PLAN = ".falaj-plan"
"""In the attempt's directory, which is handed to user code only afterwards."""


def user_code(order: Order, ranks: Sequence[Mapping[str, Any]], limits: Limits, *, control: Path) -> UserCode:
    """The first process inside, which finds what to run in a file: one argument may have 128 KiB only."""
    launch, directory = order.launch, order.launch.directory.absolute()
    plan = {
        "socket": SOCKET,
        "folder": str(directory / "code"),
        "ranks": list(ranks),
        "is_launcher": len(ranks) < launch.processes,
        "is_limited": limits.group is not None,
        "limits": limits.processes,
        "heartbeat": str(directory / hang.HEARTBEAT),
        "tolerates": tolerates(launch),
        "grace_s": launch.grace_s,
    }
    written = directory / PLAN
    written.write_text(json.dumps(plan), encoding="utf-8")
    text = Path(inside.__file__).read_text(encoding="utf-8")
    return UserCode(
        command=[order.walls.facts.python, "-I", "-S", "-c", text, str(written)],
        directory=launch.directory,
        environment=variables(launch),
        readable=[*launch.readable, *gpu_folders(launch), *nsys_folders(order.nsys)],
        hidden=[*launch.hidden, control],
        network=launch.network,
        devices=gpu_devices(launch),
        # A file system in memory is no process's own, and escapes the limits of processes.
        scratch_bytes=min(filter(None, [launch.disk_bytes, launch.memory_bytes]), default=None),
        shared_memory_bytes=launch.memory_bytes,
    )


def variables(launch: Launch) -> dict[str, str]:
    """The environment of all ranks, secrets included: it is handed on in memory."""
    told = replace(launch, environment={**launch.environment, **launch.secrets})
    found = NO_TELEMETRY | {"PYTHONFAULTHANDLER": "1"} | environment(told) | (VARIABLE if launch.nsys else {})
    if launch.hang_s is None:
        return found
    hook = Path(stacks_hook.__file__).read_text(encoding="utf-8")
    folder = str(hang.prepare(launch.directory.absolute(), hook))
    path = ":".join(filter(None, [folder, found.get("PYTHONPATH")]))
    return found | {hang.VARIABLE: folder, "PYTHONPATH": path}
