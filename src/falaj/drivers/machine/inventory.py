"""Finds out what this machine offers to jobs."""

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
from falaj.ports.hardware import NodeFacts
from falaj.records.scheduling.hardware import MPS_DIRECTORY


class LocalMachine:
    """The one machine that the platform runs on. Tests hand in a recorded `root`, CPU count and cards."""

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
    """The host's name, spelled as names are here."""
    return re.sub(r"[^a-z0-9]+", "-", host.lower()).strip("-")[:128] or "this-machine"
