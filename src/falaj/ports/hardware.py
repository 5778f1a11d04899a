"""The port for node discovery: the hardware of the machines that run jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from falaj.records.scheduling.hardware import GpuCard, RdmaPort
from falaj.records.scheduling.snapshot import Gpu


@dataclass(frozen=True)
class NodeFacts:
    """The hardware of one node that jobs may use, as it was discovered.

    `cpus` and `memory_bytes` respect the limits of the container or service that the platform runs in. `isa` names the
    instruction sets that matter to inference: avx2, avx512, vnni, amx; neon, sve. `gpus` are the schedulable devices,
    whole cards and MIG slices, with those of one NVLink island next to each other; `cards` are the physical cards.
    `gpu_fault` says why GPUs are missing, and is empty if none is. `shares` is true if an MPS daemon is running.
    """

    name: str
    cpus: int
    memory_bytes: int
    cpu_model: str = ""
    isa: frozenset[str] = frozenset()
    sockets: int | None = None
    numa_nodes: int | None = None
    gpus: tuple[Gpu, ...] = ()
    cards: tuple[GpuCard, ...] = ()
    driver: str = ""
    gpu_fault: str = ""
    rdma: tuple[RdmaPort, ...] = ()
    shares: bool = False


class NodeInventory(Protocol):
    """The nodes of this platform: the local machine, or a cluster."""

    def nodes(self) -> list[NodeFacts]:
        """Return the current nodes. A missing GPU driver is no error: `gpu_fault` reports it."""
        ...
