"""Horovod: ranks started by the horovodrun of the job's environment, over Gloo."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import PlannedProcess, PortAllocator
from falaj.ports.launcher import Launch

NEEDS_ONE_MACHINE = "horovodrun reaches other machines by ssh, which jobs do not have"


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    count = launch.processes
    loopback = [] if launch.network else ["--network-interfaces", "lo"]
    return [
        PlannedProcess(
            [
                "horovodrun",
                "--gloo",
                "-np",
                str(count),
                "-H",
                f"localhost:{count}",
                *loopback,
                *launch.command,
            ]
        )
    ]


def defaults(launch: Launch) -> dict[str, str]:
    return {} if launch.network else {"HOROVOD_GLOO_IFACE": "lo", "GLOO_SOCKET_IFNAME": "lo"}
