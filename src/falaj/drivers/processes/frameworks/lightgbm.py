"""LightGBM: one address per rank. It reads no variables: the script passes them as parameters."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import (
    PlannedProcess,
    PortAllocator,
    addresses,
    rank_environment,
    rank_gpu_environment,
)
from falaj.ports.launcher import Launch


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    count = launch.processes
    chosen = ports(count)
    shared = {
        "LIGHTGBM_MACHINES": ",".join(addresses(chosen)),
        "LIGHTGBM_NUM_MACHINES": str(count),
    }
    return [
        PlannedProcess(
            launch.command,
            f"rank {rank}",
            {
                **shared,
                **rank_environment(rank, of=count),
                **rank_gpu_environment(launch, rank, of=count),
                "LIGHTGBM_LOCAL_LISTEN_PORT": str(port),
            },
        )
        for rank, port in enumerate(chosen)
    ]
