"""LightGBM: one address per rank. It reads no variables: the script passes them as parameters."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import (
    PlannedProcess,
    PortAllocator,
    copies,
    rank_addresses,
    rank_ports,
    world_size,
)
from falaj.ports.launcher import Launch


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    chosen = rank_ports(launch, ports)
    shared = {
        "LIGHTGBM_MACHINES": ",".join(rank_addresses(launch, chosen)),
        "LIGHTGBM_NUM_MACHINES": str(world_size(launch)),
    }
    return copies(launch, shared, lambda rank: {"LIGHTGBM_LOCAL_LISTEN_PORT": str(chosen[rank])})
