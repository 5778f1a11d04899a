"""JAX: a coordinator at rank 0; jax.distributed takes rank and world size as arguments of the script's call."""

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
    (coordinator,) = addresses(ports(1))
    count = launch.processes
    shared = {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # by default it listens on all addresses
        "JAX_NUM_PROCESSES": str(count),
    }
    return [
        PlannedProcess(
            launch.command,
            f"rank {rank}",
            {
                **shared,
                **rank_environment(rank, of=count),
                **rank_gpu_environment(launch, rank, of=count),
                "JAX_PROCESS_ID": str(rank),
            },
        )
        for rank in range(count)
    ]


def defaults(launch: Launch) -> dict[str, str]:
    return {} if launch.gpus else {"JAX_PLATFORMS": "cpu"}
