"""Free resources of all nodes as arrays, to thousandths of each GPU, for placement policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from falaj.errors import Conflict
from falaj.records.scheduling.snapshot import WHOLE_GPU, Demand, Node

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NO_GPU = -1


class GpuAssignment(NamedTuple):
    """One task on a node of the fleet and on some of its GPUs, all given as indexes into the fleet's arrays.

    `gang_placement.NodeAssignment` puts several replicas on a node; the record `Placement` names node and GPUs.
    """

    node: int
    gpus: tuple[int, ...] = ()


class PlacementPolicy(Protocol):
    """Chooses where a task goes, or None if it fits nowhere. The caller allocates it. Choices are deterministic."""

    def choose(self, demand: Demand) -> GpuAssignment | None: ...


class Fleet:
    """Free resources of nodes, ordered by name, as numpy arrays. Rows are padded with GPUs that have nothing free.

    `capacity.free_capacity.FreeCapacity` is the scheduler's own account of free resources, node by node.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.name)
        self.model_names = sorted({gpu.model for node in self.nodes for gpu in node.gpus})
        widest = max((len(node.gpus) for node in self.nodes), default=0)
        shape = (len(self.nodes), max(widest, 1))
        self.cpus: Ints = np.array([node.cpus * 1000 for node in self.nodes], np.int64)
        self.memory: Ints = np.array([node.memory_bytes for node in self.nodes], np.int64)
        self.gpus: Ints = np.zeros(shape, np.int64)
        self.models: Ints = np.full(shape, NO_GPU, np.int64)
        for index, node in enumerate(self.nodes):
            count = len(node.gpus)
            self.gpus[index, :count] = WHOLE_GPU
            self.models[index, :count] = [self.model_names.index(gpu.model) for gpu in node.gpus]
        self.all_cpus, self.all_memory, self.all_gpus = self.cpus.copy(), self.memory.copy(), self.gpus.copy()
        self.changes = 0
        self.last_change: Ints = np.zeros(len(self.nodes), np.int64)  # the number of each node's last change

    def changed_since(self, seen: int) -> Ints:
        """Return the nodes changed after the change number `seen`."""
        return np.flatnonzero(self.last_change > seen)

    def fitting_gpus(self, demand: Demand) -> Flags:
        """Return for each GPU whether the requested part is free and its model matches."""
        free: Flags = self.gpus >= demand.gpu_milli
        return free if demand.gpu_models is None else free & self.has_model(demand.gpu_models)

    def has_model(self, names: frozenset[str]) -> Flags:
        wanted = [index for index, name in enumerate(self.model_names) if name in names]
        return np.isin(self.models, wanted)

    def fitting_nodes(self, demand: Demand, gpus: Flags) -> Flags:
        """Return for each node whether the task can start there; `gpus` are the fitting GPUs."""
        fits: Flags = (self.cpus >= demand.cpus_milli) & (self.memory >= demand.memory_bytes)
        return fits & (gpus.sum(axis=1) >= demand.gpus) if demand.gpus else fits

    def take(self, demand: Demand, place: GpuAssignment) -> None:
        """Allocate the task; raise Conflict if it does not fit."""
        if not self._can_take(demand, place):
            name = self.nodes[place.node].name
            raise Conflict(f"{demand!r} does not fit on node {name}, GPUs {list(place.gpus)}")
        self._move(demand, place, -1)

    def give(self, demand: Demand, place: GpuAssignment) -> None:
        """Release the task; raise Conflict if so much is not in use."""
        if not self._can_give(demand, place):
            name = self.nodes[place.node].name
            raise Conflict(f"{demand!r} does not run on node {name}, GPUs {list(place.gpus)}")
        self._move(demand, place, 1)

    def set_free(self, node: int, *, cpus_milli: int, memory_bytes: int, gpus_milli: Sequence[int]) -> None:
        """Set what is free on a node."""
        self.cpus[node], self.memory[node] = cpus_milli, memory_bytes
        self.gpus[node, : len(gpus_milli)] = gpus_milli
        self.changes += 1
        self.last_change[node] = self.changes

    def _can_take(self, demand: Demand, place: GpuAssignment) -> bool:
        node, gpus = place.node, place.gpus
        fits = self.cpus[node] >= demand.cpus_milli and self.memory[node] >= demand.memory_bytes
        if not fits or len(set(gpus)) != len(gpus) or len(gpus) != demand.gpus:
            return False
        return not gpus or bool(self.fitting_gpus(demand)[node, list(gpus)].all())

    def _can_give(self, demand: Demand, place: GpuAssignment) -> bool:
        node, gpus = place.node, list(place.gpus)
        if len(set(gpus)) != len(gpus) or len(gpus) != demand.gpus:
            return False
        return bool(
            self.cpus[node] + demand.cpus_milli <= self.all_cpus[node]
            and self.memory[node] + demand.memory_bytes <= self.all_memory[node]
            and (self.gpus[node, gpus] + demand.gpu_milli <= self.all_gpus[node, gpus]).all()
        )

    def _move(self, demand: Demand, place: GpuAssignment, sign: int) -> None:
        node = place.node
        self.cpus[node] += sign * demand.cpus_milli
        self.memory[node] += sign * demand.memory_bytes
        if place.gpus:
            self.gpus[node, list(place.gpus)] += sign * demand.gpu_milli
        self.changes += 1
        self.last_change[node] = self.changes


def first_gpus(fitting: Flags, count: int) -> tuple[int, ...]:
    """Return the first `count` fitting GPUs of one node; adjacent GPUs have adjacent indexes."""
    return tuple(int(gpu) for gpu in np.flatnonzero(fitting)[:count])
