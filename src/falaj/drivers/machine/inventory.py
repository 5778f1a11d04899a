"""Discovers the resources of the local machine."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from falaj.drivers.machine import mps
from falaj.drivers.machine.capacity import (
    affinity,
    cpu_facts,
    cpu_limit,
    memory_bytes,
    memory_limit_bytes,
    numa_nodes,
    sockets,
)
from falaj.drivers.machine.gpus import GpuDiscovery, find_cards, schedulable_gpus
from falaj.drivers.machine.kernel_files import list_entries, read_number, read_text
from falaj.ports.machine.hardware import NodeFacts
from falaj.records.scheduling.hardware import MPS_DIRECTORY, RdmaPort

RDMA_CLASS = "sys/class/infiniband"
INFINIBAND = "infiniband"


class LocalMachine:
    """The machine that the platform runs on. Tests pass a recorded `root`, CPU count and cards."""

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        name: str | None = None,
        usable_cpus: int | None = None,
        cards: Callable[[], GpuDiscovery] | None = None,
        mps_directory: Path = Path(MPS_DIRECTORY),
    ) -> None:
        self._root = root
        self._name = name or node_name(platform.node())
        self._usable_cpus = usable_cpus
        self._cards = cards or partial(find_cards, root=root)
        self._mps_directory = mps_directory

    def nodes(self) -> list[NodeFacts]:
        root, found = self._root, self._cards()
        cpus, share = self._usable_cpus or affinity(), cpu_limit(root)
        memory, bound = memory_bytes(root), memory_limit_bytes(root)
        model, isa = cpu_facts(root)
        return [
            NodeFacts(
                name=self._name,
                cpus=cpus if share is None else max(1, min(cpus, int(share))),
                memory_bytes=memory if bound is None else min(memory, bound),
                cpu_model=model,
                isa=isa,
                sockets=sockets(root),
                numa_nodes=numa_nodes(root),
                gpus=schedulable_gpus(found.cards),
                cards=found.cards,
                driver=found.driver,
                gpu_fault=found.fault,
                rdma=rdma_ports(root),
                shares=bool(found.cards) and mps.is_running(self._mps_directory),
            )
        ]


def node_name(host: str) -> str:
    """Return the host name as a valid name of a node."""
    return re.sub(r"[^a-z0-9]+", "-", host.lower()).strip("-")[:128] or "this-machine"


def rdma_ports(root: Path) -> tuple[RdmaPort, ...]:
    """Return every port of every RDMA adapter, InfiniBand and RoCE, in the order of their names."""
    return tuple(
        describe_port(device, port)
        for device in list_entries(root / RDMA_CLASS)
        for port in list_entries(device / "ports")
        if port.name.isdecimal()
    )


def describe_port(device: Path, port: Path) -> RdmaPort:
    link = read_text(port / "link_layer").lower() or "unknown"
    return RdmaPort(
        device=device.name,
        port=int(port.name),
        link=link,
        state=parse_state(read_text(port / "state")),
        rate_gbps=parse_rate_gbps(read_text(port / "rate")),
        fabric=subnet(read_text(port / "gids/0")) if link == INFINIBAND else None,
        numa_node=read_number(device / "device/numa_node"),
    )


def parse_state(text: str) -> str:
    """Return `active` for `4: ACTIVE`."""
    return text.partition(":")[2].strip().lower() or "unknown"


def parse_rate_gbps(text: str) -> float | None:
    """Return 400 for `400 Gb/sec (4X NDR)`."""
    found = re.match(r"([\d.]+) Gb/sec", text)
    return float(found[1]) if found else None


def subnet(gid: str) -> str | None:
    """Return the subnet prefix of a GID, which all ports of one fabric share."""
    parts = gid.split(":")
    return "".join(parts[:4]) if len(parts) == 8 and any(part.strip("0") for part in parts) else None
