"""Works out what to run: the command and the environment of each process."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

from falaj.drivers.processes.frameworks import default_environment, plan_processes
from falaj.drivers.processes.frameworks.process import LOOPBACK, PortAllocator
from falaj.drivers.processes.gpus import gpu_environment
from falaj.ports.launcher import Launch


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens here now. A job without the network has a loopback of its own, with all of them
    free; in one that shares the machine's, somebody else can be faster, and its framework then says so."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def plan_ranks(launch: Launch, ports: PortAllocator = free_ports) -> list[dict[str, Any]]:
    """For each process to start: its command, the variables that it has alone, and whether its end decides."""
    return [
        {
            "command": list(each.command),
            "environment": dict(each.environment),
            "name": each.name,
            "decides": each.decides,
        }
        for each in plan_processes(launch, ports)
    ]


def shared_environment(launch: Launch) -> dict[str, str]:
    """The whole environment that the processes share; what the launch sets wins, but for the GPUs."""
    threads = str(max(1, launch.cpus // max(1, launch.processes)))
    # joblib would count the machine's cores.
    decided = {"OMP_NUM_THREADS": threads, "LOKY_MAX_CPU_COUNT": threads, "PYTHONUNBUFFERED": "1"}
    return decided | default_environment(launch) | dict(launch.environment) | gpu_environment(launch)
