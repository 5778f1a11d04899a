"""The port for node discovery: the hardware of the machines that run jobs, and how their GPUs are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple, Protocol

from falaj.records.scheduling.hardware import GpuCard, RdmaPort
from falaj.records.scheduling.snapshot import Gpu, HeldByOthers


class NodeTaint(NamedTuple):
    """A taint of a node: pods that do not tolerate it are kept off, or evicted."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True)
class ClusterNode:
    """What a cluster says of a node beside its hardware.

    A `cordoned` node takes no new jobs; a `lost` one does not answer, and what ran there may still run. `since` is when
    that began, if it is known; `keeps_off` are the taints that keep jobs off. `autoscaling` has what autoscalers say of
    it, in words. `mig_config` and `sharing_config` are the configurations of NVIDIA's MIG manager and device plugin
    that it should have, and `mig_state` is how the MIG manager fares. `zone` is the zone of the platform that its
    labels map to; none: they map to none. `cpus_milli` are the allocatable thousandths of CPUs, and `resources` the
    allocatable amounts of all but CPUs and memory, by the names that pods request them by. `selector` has the cluster's
    own labels of the node by which others like it are found.
    """

    state: Literal["ready", "cordoned", "lost"] = "ready"
    reason: str = ""
    since: datetime | None = None
    keeps_off: tuple[str, ...] = ()
    autoscaling: tuple[str, ...] = ()
    mig_config: str | None = None
    mig_state: str = ""
    sharing_config: str | None = None
    zone: str | None = None
    pool: str | None = None
    fabric: str | None = None
    labels: frozenset[str] = frozenset()
    taints: tuple[NodeTaint, ...] = ()
    cpus_milli: int = 0
    resources: Mapping[str, int] = field(default_factory=dict)
    selector: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeFacts:
    """The hardware of one node that jobs may use, as it was discovered.

    `cpus` and `memory_bytes` respect the limits of the container or service that the platform runs in. `isa` names the
    instruction sets that matter to inference: avx2, avx512, vnni, amx; neon, sve. `gpus` are the schedulable devices,
    whole cards and MIG slices, with those of one NVLink island next to each other; `cards` are the physical cards.
    `gpu_fault` says why GPUs are missing, and is empty if none is. `shares` is true if an MPS daemon is running.
    `others` is what programs hold that are not this platform's; none where that is not known, as on one machine.
    `cluster` is what a cluster says of it; none for the local machine.
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
    others: HeldByOthers | None = None
    cluster: ClusterNode | None = None


class NodeInventory(Protocol):
    """The nodes of this platform: the local machine, or a cluster."""

    def nodes(self) -> list[NodeFacts]:
        """Return the current nodes. A missing GPU driver is no error: `gpu_fault` reports it.

        Raise Unavailable if they were never read. While a cluster does not answer, return the nodes as last known.
        """
        ...


@dataclass(frozen=True)
class GpuTelemetry:
    """What a card reports now; none: it does not say. A MIG slice shares the figures of its card.

    `busy` is the share of time in which a kernel ran. Rates of PCIe are bytes a second over the last moments; NVLink
    counts bytes since the driver was loaded. `ecc_errors` are those since then, by corrected and uncorrected.
    """

    id: str
    model: str
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    busy: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    pcie_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    nvlink_bytes: Mapping[str, float] = field(default_factory=dict)
    ecc_errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeTelemetry:
    """What a node reports now: totals since boot, and levels.

    `cpu_s` is by mode as in /proc/stat, `network_bytes` by adapter and direction, `disk_bytes` by device and direction,
    `volumes` the size and the free bytes of the volumes that the platform writes to.
    """

    name: str
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    load: float | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    network_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    disk_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    volumes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    gpus: tuple[GpuTelemetry, ...] = ()


Places = tuple[tuple[str, int], ...]
"""Profiles, each with the memory slice that it begins at; none: the GPU is whole."""


class MigTool(Protocol):
    """Cuts GPUs. No process may use them meanwhile."""

    def cut(self, cards: Mapping[GpuCard, Places], *, before: Mapping[GpuCard, Places]) -> None:
        """Cut the cards so. Unavailable with the driver's words if one could not be cut.

        All are then as `before` again, as far as the driver lets them be; the error says where it does not.
        """
        ...
