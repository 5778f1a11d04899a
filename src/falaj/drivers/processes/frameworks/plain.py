"""Copies of one command with rank and world size; also the contract of scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import (
    PlannedProcess,
    PortAllocator,
    own_ranks,
    rank_environment,
    rendezvous,
    world_size,
)
from falaj.ports.launcher import Launch


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    if world_size(launch) == 1:
        return [PlannedProcess(launch.command)]
    host, port = rendezvous(launch, ports)
    shared = {"FALAJ_MASTER_ADDR": host, "FALAJ_MASTER_PORT": str(port)}
    return [
        PlannedProcess(launch.command, f"rank {rank}", shared | rank_environment(launch, rank))
        for rank in own_ranks(launch)
    ]
