"""Copies of one command with rank and world size; also the contract of scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import PlannedProcess, PortAllocator, rank_environment
from falaj.ports.launcher import Launch


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    if launch.processes == 1:
        return [PlannedProcess(launch.command)]
    count = launch.processes
    return [
        PlannedProcess(launch.command, f"rank {rank}", rank_environment(rank, of=count))
        for rank in range(count)
    ]
