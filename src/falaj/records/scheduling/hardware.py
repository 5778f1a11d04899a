"""The hardware of a machine, in more detail than placement needs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from falaj.records.record import Record
from falaj.records.scheduling.snapshot import Count, Node

MPS_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 - where NVIDIA's daemon listens unless told otherwise

DriverText = Annotated[str, Field(max_length=256)]


class MigSlice(Record):
    """A MIG slice of a card."""

    id: DriverText
    profile: DriverText
    memory_bytes: Count


class GpuCard(Record):
    """A GPU as it is plugged in; none: the driver does not say.

    `nvlinks` counts the links that are up. `pcie_width` is that of now, `pcie_generation` the best: a card that idles
    falls back to an older one.
    """

    id: DriverText
    index: Count
    model: DriverText
    memory_bytes: Count
    compute_capability: DriverText | None = None
    pci_address: DriverText | None = None
    pcie_generation: Count | None = None
    pcie_width: Count | None = None
    numa_node: Count | None = None
    nvlinks: Count = 0
    island: Count = 0
    is_sliced: bool = False
    slices: tuple[MigSlice, ...] = ()
    counts_energy: bool = False


class RdmaPort(Record):
    """A port of an InfiniBand or RoCE adapter. `fabric` is its subnet's prefix; none: it has none, as on Ethernet."""

    device: DriverText
    port: Count
    link: DriverText
    state: DriverText
    rate_gbps: float | None = None
    fabric: DriverText | None = None
    numa_node: Count | None = None

    @property
    def is_active(self) -> bool:
        return self.state == "active"


class FreeResources(Record):
    """The free resources of a node. `gpu_milli` has the thousandths left of each of its GPUs, in order."""

    cpus: Count
    memory_bytes: Count
    gpus: Count
    gpu_milli: tuple[Count, ...] = ()


class Machine(Record):
    """A node with what it is made of, and what is free of it. `gpu_fault` says why GPUs are missing."""

    node: Node
    free: FreeResources
    cpu_model: str = ""
    isa: frozenset[str] = frozenset()
    sockets: Count | None = None
    numa_nodes: Count | None = None
    driver: str = ""
    cards: tuple[GpuCard, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    gpu_fault: str = ""
