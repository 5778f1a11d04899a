"""The hardware of a machine, in more detail than placement needs."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from falaj.records.names import ObjectId
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


class Cordon(Record):
    """A node that an operator has taken out of service: it starts no further jobs, and a `drained` one keeps none."""

    since: datetime
    by: str
    reason: str = ""
    drained: bool = False


class ClusterStatus(Record):
    """What the cluster says of a node.

    A `cordoned` one takes no new pods, and a `lost` one does not answer, `since` when and for which `reason`. `taints`
    are those that keep jobs off. `spot` capacity can be taken away at any moment. `autoscaling` has what autoscalers
    say of it. `mig_config` and `sharing_config` are the configurations of NVIDIA's MIG manager and device plugin that
    it should have, and `mig_state` is how the MIG manager fares (pending, success, failed).
    """

    state: Literal["ready", "cordoned", "lost"] = "ready"
    reason: str = ""
    since: datetime | None = None
    taints: tuple[str, ...] = ()
    spot: bool = False
    autoscaling: tuple[str, ...] = ()
    mig_config: str | None = None
    mig_state: str = ""
    sharing_config: str | None = None


class Machine(Record):
    """A node with what it is made of, how many jobs run on it, and what is free of it.

    `cordon` is the platform's own, `cluster` what a cluster says; none for the local machine. `gpu_fault` says why GPUs
    are missing.
    """

    node: Node
    free: FreeResources
    jobs: Count = 0
    cordon: Cordon | None = None
    cluster: ClusterStatus | None = None
    cpu_model: str = ""
    isa: frozenset[str] = frozenset()
    sockets: Count | None = None
    numa_nodes: Count | None = None
    driver: str = ""
    cards: tuple[GpuCard, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    gpu_fault: str = ""

    @property
    def is_lost(self) -> bool:
        return self.cluster is not None and self.cluster.state == "lost"


class NodePod(Record):
    """A pod on a node. `job` is the job of this platform that it belongs to, `owner` what made it (DaemonSet/proxy)."""

    namespace: str
    name: str
    owner: str = ""
    job: str | None = None


class NodeDrain(Record):
    """A drained node: the jobs that save a checkpoint and go back to their queues, and those that run to their end.

    `others` are the pods that are not the platform's, which it leaves alone; `unseen` says why they are not known.
    """

    machine: Machine
    leaving: tuple[ObjectId, ...] = ()
    staying: tuple[ObjectId, ...] = ()
    others: tuple[NodePod, ...] = ()
    unseen: str = ""


def label_part(model: str) -> str:
    """Return the model as part of a label: NVIDIA H100 80GB HBM3 becomes nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:120]
