"""Find a node for a single replica, with candidates cached by size, so that a start need not visit every node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from falaj.records.scheduling.snapshot import WHOLE_GPU, Request, Resources
from falaj.scheduling.capacity.free_capacity import FreeCapacity
from falaj.scheduling.placement.gang_placement import NodeAssignment, capacity, in_an_island, tightness

if TYPE_CHECKING:
    from falaj.scheduling.placement.gpu_packing import GpuPacking

CountRequests = Callable[[], Iterable[tuple[Request, int]]]


class NodeSearch:
    """Searches the open capacity of the nodes. `tally` yields waiting and running requests with their counts."""

    def __init__(self, capacity_now: FreeCapacity, tally: CountRequests) -> None:
        self.capacity_now = capacity_now
        self.tally = tally
        self._tightest: dict[tuple[object, ...], TightestNodes] = {}
        self._packing: GpuPacking | None = None
        self._gpu_nodes = sum(1 for node in capacity_now.cluster.nodes if node.gpus)

    def one(self, request: Request, permitted: Sequence[int]) -> NodeAssignment | None:
        """Return a node for the only replica of a job without an island requirement, in the best cluster."""
        for nodes in self.capacity_now.cluster.by_cluster(request, permitted):
            spot = self._within(request, nodes)
            if spot is not None:
                return spot
        return None

    def _within(self, request: Request, permitted: Sequence[int]) -> NodeAssignment | None:
        if self._packs(request):
            spot = self._packed(request, permitted)
            if spot is not None:
                return spot
        tightest = self._for(request, permitted)
        index = tightest.first()
        if index is None:
            return None
        if not request.each.gpus and self._gpu_nodes > 1 and self.capacity_now.cluster.nodes[index].gpus:
            return self._packed(request, permitted) or NodeAssignment(index, 1)  # CPU jobs can fragment GPUs
        found = in_an_island(
            request, self.capacity_now.open, tightest.fitting(request), self.capacity_now.cluster, tightness
        )
        return found[0] if found else NodeAssignment(index, 1)

    def _for(self, request: Request, permitted: Sequence[int]) -> TightestNodes:
        each = request.each
        key = (
            id(permitted),
            each.cpus,
            each.gpus,
            each.memory_bytes,
            each.gpu_milli,
            each.gpu_memory_bytes,
            each.gpu_models,
            each.gpu_profile,
        )
        found = self._tightest.get(key)
        if found is None:
            found = self._tightest[key] = TightestNodes(self.capacity_now, each, permitted)
        return found

    def _packs(self, request: Request) -> bool:
        """Return whether the job is placed by least fragmentation: if no island has to be found."""
        each = request.each
        return (
            each.gpus > 0
            and self._gpu_nodes > 0
            and each.gpu_profile is None
            and (each.gpus == 1 or not self.capacity_now.cluster.many_islands)
            and (self._gpu_nodes > 1 or each.gpu_milli < WHOLE_GPU)
        )

    def _packed(self, request: Request, permitted: Sequence[int]) -> NodeAssignment | None:
        if self._packing is None:
            from falaj.scheduling.placement.gpu_packing import GpuPacking, workload_of

            self._packing = GpuPacking(self.capacity_now, workload_of(self.tally()))
        return self._packing.choose(request, permitted)


class TightestNodes:
    """The nodes that hold a replica of one size, the tightest first."""

    def __init__(self, capacity_now: FreeCapacity, each: Resources, permitted: Sequence[int]) -> None:
        self.capacity_now, self.each = capacity_now, each
        everywhere = len(permitted) == len(capacity_now.cluster.nodes)
        self._permitted = None if everywhere else frozenset(permitted)
        self._heap = [tightness(index, capacity_now.open[index]) for index in permitted if self._fits(index)]
        heapify(self._heap)
        self._seen = len(capacity_now.log)

    def first(self) -> int | None:
        self._see_changes()
        heap, slots = self._heap, self.capacity_now.open
        while heap:
            index = heap[0][3]
            if heap[0] == tightness(index, slots[index]) and self._fits(index):
                return index
            heappop(heap)
        return None

    def fitting(self, request: Request) -> list[int]:
        """Return all fitting nodes if islands matter for the job, else none."""
        if request.each.gpus < 2 or not self.capacity_now.cluster.many_islands:
            return []
        slots = self.capacity_now.open
        return [entry[3] for entry in self._heap if entry == tightness(entry[3], slots[entry[3]])]

    def _see_changes(self) -> None:
        log = self.capacity_now.log
        if self._seen < len(log):
            for index in set(log[self._seen :]):
                if (self._permitted is None or index in self._permitted) and self._fits(index):
                    heappush(self._heap, tightness(index, self.capacity_now.open[index]))
            self._seen = len(log)

    def _fits(self, index: int) -> bool:
        each = self.each
        devices = self.capacity_now.cluster.devices(index, each) if each.gpus else 0
        return capacity(self.capacity_now.open[index], each, devices) > 0
