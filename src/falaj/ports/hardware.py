"""What the machines that run jobs are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from falaj.records.scheduling.hardware import GpuCard, RdmaPort
from falaj.records.scheduling.snapshot import Gpu


@dataclass(frozen=True)
class NodeFacts:
    """One machine, as far as jobs may use it: looked up, not guessed.

    `cpus` and `memory_bytes` are what this platform may use of it, where something limits it. `isa` names the
    instruction sets that decide how fast a model runs: avx2, avx512, vnni, amx; neon, sve. `gpus` are what can be
    handed out, whole cards and slices, those of one NVLink island side by side; `cards` are the cards themselves.
    `gpu_fault` says why GPUs are missing, empty if none is. `shares`: an MPS daemon answers here.
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
    """Where nodes come from: this machine, or a cluster."""

    def nodes(self) -> list[NodeFacts]:
        """The machines as they are now. Never fails for want of a GPU driver: `gpu_fault` says so instead."""
        ...
