"""Place a single-replica job on the GPU nodes by least fragmentation.

It feeds `LeastFragmentation` with what is open on the nodes that have GPUs. This module loads numpy, so it is imported
only when the first such job is decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from falaj.records.scheduling.snapshot import WHOLE_GPU, Demand, Request
from falaj.scheduling.capacity.free_capacity import FreeCapacity
from falaj.scheduling.capacity.resources import NodeResources
from falaj.scheduling.placement.fleet import Flags, Fleet
from falaj.scheduling.placement.gang_placement import NodeAssignment, capacity
from falaj.scheduling.placement.least_fragmentation import LeastFragmentation


class GpuPacking:
    """A fleet of the GPU nodes, kept in step with the open capacity of the round."""

    def __init__(self, capacity_now: FreeCapacity, workload: Mapping[Demand, int]) -> None:
        self.capacity_now = capacity_now
        nodes = capacity_now.cluster.nodes
        self.nodes = [index for index, node in enumerate(nodes) if node.gpus]
        self.place_of = {index: place for place, index in enumerate(self.nodes)}
        self.fleet = Fleet([nodes[index] for index in self.nodes])
        for index in self.nodes:
            if capacity_now.open[index] != capacity_now.cluster.idle[index] or has_slices(
                capacity_now, index
            ):
                self._copy(index)
        self.policy = LeastFragmentation(self.fleet, workload)
        self.seen = len(capacity_now.log)
        self._among: dict[tuple[int, bool], Flags | None] = {}

    def choose(self, request: Request, permitted: Sequence[int]) -> NodeAssignment | None:
        """Return an assignment; None if the job fits nowhere, or its GPU memory does not fit on the chosen GPU."""
        self._see_changes()
        demand = demand_of(request)
        place = self.policy.choose(demand, self._nodes_among(request, permitted))
        if place is None:
            return None
        index = self.nodes[place.node]
        devices = sum(1 << gpu for gpu in place.gpus) & self.capacity_now.cluster.devices(index, request.each)
        fits = capacity(self.capacity_now.open[index], request.each, devices) >= 1
        return NodeAssignment(index, 1, devices) if fits else None

    def _nodes_among(self, request: Request, permitted: Sequence[int]) -> Flags | None:
        part = request.each.gpu_milli < WHOLE_GPU
        key = id(permitted), part
        if key not in self._among:
            allowed = set(permitted)
            nodes = self.capacity_now.cluster.nodes
            flags = [index in allowed and (not part or nodes[index].shares) for index in self.nodes]
            self._among[key] = None if all(flags) else np.array(flags)
        return self._among[key]

    def _see_changes(self) -> None:
        log = self.capacity_now.log
        if self.seen < len(log):
            for index in set(log[self.seen :]):
                if index in self.place_of:
                    self._copy(index)
            self.seen = len(log)

    def _copy(self, index: int) -> None:
        slot, devices = self.capacity_now.open[index], self.capacity_now.cluster.hardware[index].devices
        free = [0 if profile else milli_free(slot, bit) for bit, (_, _, profile, _) in enumerate(devices)]
        self.fleet.set_free(
            self.place_of[index],
            cpus_milli=max(slot.cpus, 0) * 1000,
            memory_bytes=max(slot.memory, 0),
            gpus_milli=free,
        )


def milli_free(slot: NodeResources, bit: int) -> int:
    if slot.parts:
        return min(max(slot.parts[bit][0], 0), WHOLE_GPU)
    return WHOLE_GPU if slot.gpus >> bit & 1 else 0


def has_slices(capacity_now: FreeCapacity, index: int) -> bool:
    return any(profile for _, _, profile, _ in capacity_now.cluster.hardware[index].devices)


def workload_of(tally: Iterable[tuple[Request, int]]) -> dict[Demand, int]:
    """Return the GPU demands of the jobs with their counts, as the workload of the fragmentation measure."""
    found: Counter[Demand] = Counter()
    for request, count in tally:
        if request.each.gpus and request.each.gpu_profile is None:
            found[demand_of(request)] += count * request.replicas
    return dict(found)


def demand_of(request: Request) -> Demand:
    each = request.each
    return Demand(
        cpus_milli=each.cpus * 1000,
        memory_bytes=each.memory_bytes,
        gpus=each.gpus,
        gpu_milli=each.gpu_milli,
        gpu_models=each.gpu_models,
    )
