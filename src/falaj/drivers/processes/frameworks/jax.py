"""JAX: a coordinator at rank 0; jax.distributed takes rank and world size as arguments of the script's call."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import (
    PlannedProcess,
    PortAllocator,
    address,
    copies,
    rendezvous,
    world_size,
)
from falaj.ports.launcher import Launch


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    coordinator = address(*rendezvous(launch, ports))
    shared = {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # by default it listens on all addresses
        "JAX_NUM_PROCESSES": str(world_size(launch)),
    }
    return copies(launch, shared, lambda rank: {"JAX_PROCESS_ID": str(rank)})


def defaults(launch: Launch) -> dict[str, str]:
    return {} if launch.gpus else {"JAX_PLATFORMS": "cpu"}
