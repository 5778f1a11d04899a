"""The nodes of the cluster, and which of them and of their GPUs a job may use, regardless of what is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from falaj.records.scheduling.snapshot import (
    WHOLE_GPU,
    Affinity,
    Node,
    Placement,
    Request,
    Resources,
    RunningJob,
)
from falaj.scheduling.capacity.resources import (
    END_OF_TIME,
    Allocation,
    NodeResources,
    ResourceAmount,
    rank,
    requested_amount,
    slice_thousandths,
)

NO_AFFINITY: Affinity = Request.model_fields["affinity"].default


class NodeDevices(NamedTuple):
    """Model, memory, MIG profile and island of each device of a node. Nodes of one kind share it."""

    devices: tuple[tuple[str, int, str | None, int], ...]

    def islands(self) -> list[int]:
        """Return the device mask of each NVLink island."""
        found: dict[int, int] = {}
        for bit, (_, _, _, island) in enumerate(self.devices):
            found[island] = found.get(island, 0) | 1 << bit
        return [found[island] for island in sorted(found)]

    def usable(self, each: Resources) -> int:
        """Return the mask of devices that match the request of a replica."""
        found = 0
        for bit, (model, memory, profile, _) in enumerate(self.devices):
            right_model = each.gpu_models is None or model in each.gpu_models
            if right_model and profile == each.gpu_profile and memory >= each.gpu_memory_bytes:
                found |= 1 << bit
        return found


class Cluster:
    """The nodes, indexed in the order of their names."""

    def __init__(self, nodes: Iterable[Node], running: Iterable[RunningJob] = ()) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.name)
        self.all = range(len(self.nodes))
        self.index = {node.name: index for index, node in enumerate(self.nodes)}
        self.hardware = [devices_of(node) for node in self.nodes]
        self.kinds = list(dict.fromkeys(self.hardware))
        numbers = {kind: number for number, kind in enumerate(self.kinds)}
        self.kind = [numbers[each] for each in self.hardware]
        self.in_parts = self._in_parts(running)
        self.shared_with_others = [index for index, node in enumerate(self.nodes) if node.others is not None]
        self.idle = [self._idle(index) for index in self.all]
        self.whole = self._whole()
        self._islands = [each.islands() for each in self.kinds]
        self.many_islands = any(len(found) > 1 for found in self._islands)
        self.has_gpus = any(each.devices for each in self.kinds)
        self.names = {node.cluster for node in self.nodes}
        self.has_burst = any(node.burst for node in self.nodes)
        self._by_cluster: dict[tuple[object, ...], list[list[int]]] = {}
        self._usable: dict[tuple[object, ...], list[int]] = {}
        self._permitted: dict[tuple[object, ...], list[int]] = {}

    def islands(self, index: int) -> list[int]:
        return self._islands[self.kind[index]]

    def devices(self, index: int, each: Resources) -> int:
        """Return the mask of the node's devices that match the request of a replica."""
        if each.gpu_milli < WHOLE_GPU and not self.nodes[index].shares:
            return 0
        key = each.gpu_models, each.gpu_profile, each.gpu_memory_bytes
        if key not in self._usable:
            self._usable[key] = [kind.usable(each) for kind in self.kinds]
        return self._usable[key][self.kind[index]]

    def permitted(
        self, request: Request, *, anywhere: bool = False, even_cordoned: bool = False
    ) -> list[int]:
        """Return the nodes that the residency label and the affinity permit and that are not cordoned.

        `anywhere` ignores the affinity, `even_cordoned` the cordons.
        """
        affinity = NO_AFFINITY if anywhere else request.affinity
        key = request.label.only, affinity.pools, affinity.labels, affinity.avoid, even_cordoned
        if key not in self._permitted:
            self._permitted[key] = [
                index
                for index, node in enumerate(self.nodes)
                if request.label.permits(node.jurisdiction)
                and matches_affinity(node, affinity)
                and (even_cordoned or not node.cordoned)
            ]
        return self._permitted[key]

    def by_cluster(self, request: Request, permitted: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the permitted nodes of each cluster, the best first: no burst, near the data, cheap.

        All replicas of a job run in one cluster. The same lists are returned again: searches are cached by them.
        """
        if len(self.names) <= 1:
            return (permitted,)
        each = request.each
        kind = each.cpus, each.gpus, each.gpu_milli, each.gpu_models, each.gpu_profile, each.gpu_memory_bytes
        key = (tuple(permitted), request.data_zones, *kind)
        if key not in self._by_cluster:
            found: dict[str, list[int]] = {}
            for index in permitted:
                found.setdefault(self.nodes[index].cluster or "", []).append(index)
            order = sorted(found, key=lambda name: (*self._rank(request, found[name]), name))
            self._by_cluster[key] = [found[name] for name in order]
        return self._by_cluster[key]

    def _rank(self, request: Request, nodes: Sequence[int]) -> tuple[bool, bool, float]:
        """Return how much a cluster with these nodes is to be avoided: burst, away from the data, and cost."""
        zones = {self.nodes[index].zone for index in nodes}
        is_away = bool(request.data_zones) and not zones & request.data_zones
        cost = min(self._hourly(index, request.each) for index in nodes)
        return any(self.nodes[index].burst for index in nodes), is_away, cost

    def _hourly(self, index: int, each: Resources) -> float:
        """Return the price of a replica on a node, on the cheapest of its GPUs that will do."""
        price, node = self.nodes[index].price, self.nodes[index]
        if price is None:
            return 0.0
        usable = self.devices(index, each) if each.gpus else 0
        models = {gpu.model for bit, gpu in enumerate(node.gpus) if usable >> bit & 1}
        gpu = min((price.gpus.get(model, price.gpu) for model in models), default=price.gpu)
        return each.cpus * price.cpu + each.gpus * each.gpu_milli / WHOLE_GPU * gpu

    def without_burst(self, permitted: Sequence[int]) -> list[int]:
        """Return the permitted nodes that are no burst capacity."""
        key = ("no burst", tuple(permitted))
        if key not in self._by_cluster:
            self._by_cluster[key] = [[index for index in permitted if not self.nodes[index].burst]]
        return self._by_cluster[key][0]

    def held_by(self, running: RunningJob) -> Allocation:
        request = running.request
        return Allocation(
            running.ends_by or END_OF_TIME,
            running.started_at,
            rank(request),
            request,
            requested_amount(request),
            self.slots_of(request, running.placements),
            running.borrows,
            running.leaving,
        )

    def slots_of(
        self, request: Request, placements: Sequence[Placement]
    ) -> tuple[tuple[int, NodeResources], ...]:
        """Return what the replicas hold on each node, without lost nodes."""
        found = []
        for placement in placements:
            index = self.index.get(placement.node)
            if index is not None:
                found.append((index, self._held_on(index, request.each, placement.gpus)))
        return tuple(found)

    def _held_on(self, index: int, each: Resources, gpus: tuple[str, ...]) -> NodeResources:
        mask = 0
        if gpus:
            for bit, gpu in enumerate(self.nodes[index].gpus):
                if gpu.id in gpus:
                    mask |= 1 << bit
        if not mask or index not in self.in_parts:
            return NodeResources(each.cpus, each.memory_bytes, mask)
        devices = self.hardware[index].devices
        parts = [
            (*allocated_part(each, device[1]), device[1]) if mask >> bit & 1 else (0, 0, device[1])
            for bit, device in enumerate(devices)
        ]
        return NodeResources(each.cpus, each.memory_bytes, mask, tuple(parts))

    def held_by_others(self, index: int, taken: int) -> NodeResources:
        """Return what others hold of a node. Their GPUs are thought to be the last ones that no job holds (`taken`)."""
        others, mask = self.nodes[index].others, 0
        if others is None:
            return NodeResources(0, 0, 0)
        devices = self.hardware[index].devices
        for profile, count in others.gpus.items():
            alike = [bit for bit, device in enumerate(devices) if (device[2] or "") == profile]
            for bit in [bit for bit in alike if not taken >> bit & 1][-count:] if count else ():
                mask |= 1 << bit
        return NodeResources(others.cpus, others.memory_bytes, mask)

    def _in_parts(self, running: Iterable[RunningJob]) -> set[int]:
        """Return the nodes with shared GPUs, also those that no longer share but still run such jobs."""
        found = {index for index, node in enumerate(self.nodes) if node.shares and node.gpus}
        for job in running:
            if job.request.each.gpu_milli < WHOLE_GPU:
                found |= {self.index[each.node] for each in job.placements if each.node in self.index}
        return found

    def _idle(self, index: int) -> NodeResources:
        node, devices = self.nodes[index], self.hardware[index].devices
        parts = (
            tuple([(WHOLE_GPU, memory, memory) for _, memory, _, _ in devices])
            if index in self.in_parts
            else ()
        )
        return NodeResources(node.cpus, node.memory_bytes, (1 << len(devices)) - 1, parts)

    def _whole(self) -> ResourceAmount:
        """Return the total capacity of the cluster."""
        gpus = [
            sum(slice_thousandths(profile) if profile else WHOLE_GPU for _, _, profile, _ in kind.devices)
            for kind in self.kinds
        ]
        return ResourceAmount(
            sum(node.cpus for node in self.nodes),
            sum(gpus[kind] for kind in self.kind),
            sum(node.memory_bytes for node in self.nodes),
        )


def devices_of(node: Node) -> NodeDevices:
    return NodeDevices(tuple([(gpu.model, gpu.memory_bytes, gpu.profile, gpu.island) for gpu in node.gpus]))


def matches_affinity(node: Node, affinity: Affinity) -> bool:
    return (
        (not affinity.pools or node.pool in affinity.pools)
        and affinity.labels <= node.labels
        and not affinity.avoid & node.labels
    )


def allocated_part(each: Resources, memory: int) -> tuple[int, int]:
    """Return the thousandths and bytes that a replica holds of a device with `memory` bytes.

    If the request does not state the bytes, they are proportional to the thousandths.
    """
    if each.gpu_milli == WHOLE_GPU:
        return WHOLE_GPU, memory
    return each.gpu_milli, each.gpu_memory_bytes or memory * each.gpu_milli // WHOLE_GPU
