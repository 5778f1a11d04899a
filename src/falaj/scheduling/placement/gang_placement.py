"""Gang placement: all replicas of a job or none, as close together as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from falaj.records.scheduling.snapshot import WHOLE_GPU, Placement, Request, Resources
from falaj.scheduling.capacity.cluster import Cluster, allocated_part
from falaj.scheduling.capacity.resources import NodeResources

ALL_DEVICES = -1


class NodeAssignment(NamedTuple):
    """Some replicas of a gang on one node, given by its index in the cluster, within a mask of its devices.

    `placements` turns it into `Placement` records, which name the node and the GPUs of each replica.
    """

    node: int
    replicas: int
    devices: int = ALL_DEVICES


Slots = Sequence[NodeResources]
Preference = Callable[[int, NodeResources], tuple[int, ...]]


def tightness(index: int, slot: NodeResources) -> tuple[int, ...]:
    """Return a key that is small where little is free. GPUs count first, so that CPU jobs avoid GPU nodes."""
    return slot.gpus.bit_count(), slot.cpus, slot.memory, index


def by_index(index: int, slot: NodeResources) -> tuple[int, ...]:
    """Return a key that is small for the first node, so that allocations elsewhere do not move the placement."""
    return (index,)


def place_gang(
    request: Request,
    slots: Slots,
    permitted: Sequence[int],
    cluster: Cluster,
    prefer: Preference = tightness,
) -> list[NodeAssignment] | None:
    """Return nodes for all replicas, or None: in one NVLink island, else one node, else one RDMA fabric, else any.

    All are in one cluster. `prefer` orders the alternatives there. Replicas are identical, so counting how many fit on
    each node finds a placement whenever there is one.
    """
    for nodes in cluster.by_cluster(request, permitted):
        found = place_within(request, slots, nodes, cluster, prefer)
        if found is not None:
            return found
    return None


def place_within(
    request: Request, slots: Slots, permitted: Iterable[int], cluster: Cluster, prefer: Preference
) -> list[NodeAssignment] | None:
    """Return nodes of one cluster for all replicas, or None."""
    each, wanted, affinity = request.each, request.replicas, request.affinity
    fitting = [
        NodeAssignment(index, 1 if affinity.spread else count)
        for index in permitted
        if (count := capacity(slots[index], each, cluster.devices(index, each) if each.gpus else 0))
    ]
    whole = (
        [] if affinity.spread and wanted > 1 else [spot.node for spot in fitting if spot.replicas >= wanted]
    )
    if whole:
        found = in_an_island(request, slots, whole, cluster, prefer)
        if found or affinity.island == "nvlink":
            return found
        return [NodeAssignment(min(whole, key=lambda index: prefer(index, slots[index])), wanted)]
    if affinity.island == "nvlink" or sum(spot.replicas for spot in fitting) < wanted:
        return None
    in_order = largest_first if prefer is tightness else in_sequence
    together = in_a_fabric(fitting, wanted, cluster, prefer)
    if together is None and affinity.island == "rdma":
        return None
    return in_order(together or fitting, wanted)


def capacity(slot: NodeResources, each: Resources, devices: int) -> int:
    """Return how many replicas fit in `slot` on these devices."""
    count = slot.cpus // each.cpus
    if each.memory_bytes:
        count = min(count, slot.memory // each.memory_bytes)
    if each.gpus and count > 0:
        if each.gpu_milli < WHOLE_GPU:
            count = min(count, capacity_of_parts(slot, each, devices))
        else:
            count = min(count, (slot.gpus & devices).bit_count() // each.gpus)
    return max(count, 0)


def capacity_of_parts(slot: NodeResources, each: Resources, devices: int) -> int:
    found = 0
    for bit, part in enumerate(slot.parts):
        if devices >> bit & 1:
            found += times(part, each)
    return found


def times(part: tuple[int, int, int], each: Resources) -> int:
    """Return how many replicas fit in the free part of one device."""
    free, memory, all_memory = part
    milli, size = allocated_part(each, all_memory)
    count = free // milli
    return max(min(count, memory // size) if size else count, 0)


# ---------------------------------------------------------------------------------------------- together


def in_an_island(
    request: Request, slots: Slots, nodes: Sequence[int], cluster: Cluster, prefer: Preference
) -> list[NodeAssignment] | None:
    """Return one NVLink island of these nodes that holds the job; None if there is none, or for one GPU."""
    each, wanted = request.each, request.replicas
    hard = request.affinity.island == "nvlink"
    if not each.gpus or not (hard or (cluster.many_islands and each.gpus * wanted > 1)):
        return None
    found = []
    for index in nodes:
        devices, slot = cluster.devices(index, each), slots[index]
        for island in cluster.islands(index):
            if capacity(slot, each, devices & island) >= wanted:
                tight = (slot.gpus & island).bit_count() if prefer is tightness else 0
                found.append(((tight, *prefer(index, slot), island), NodeAssignment(index, wanted, island)))
    return [min(found)[1]] if found else None


def in_a_fabric(
    fitting: Sequence[NodeAssignment], wanted: int, cluster: Cluster, prefer: Preference
) -> list[NodeAssignment] | None:
    """Return the nodes of the smallest RDMA fabric that holds all replicas; None if none does."""
    by_fabric: dict[str, list[NodeAssignment]] = {}
    for spot in fitting:
        fabric = cluster.nodes[spot.node].fabric
        if fabric is not None:
            by_fabric.setdefault(fabric, []).append(spot)
    replicas_in = {name: sum(spot.replicas for spot in spots) for name, spots in by_fabric.items()}
    enough = [
        (count if prefer is tightness else 0, name) for name, count in replicas_in.items() if count >= wanted
    ]
    return by_fabric[min(enough)[1]] if enough else None


def largest_first(fitting: Sequence[NodeAssignment], wanted: int) -> list[NodeAssignment]:
    """Return as few nodes as possible."""
    return in_sequence(sorted(fitting, key=lambda spot: (-spot.replicas, spot.node)), wanted)


def in_sequence(fitting: Sequence[NodeAssignment], wanted: int) -> list[NodeAssignment]:
    spots = []
    for spot in fitting:
        spots.append(NodeAssignment(spot.node, min(spot.replicas, wanted)))
        wanted -= spots[-1].replicas
        if not wanted:
            break
    return spots


# ------------------------------------------------------------------------------------------------ devices


def placements(
    request: Request, spots: Sequence[NodeAssignment], slots: Slots, cluster: Cluster
) -> tuple[Placement, ...]:
    """Return the node and GPUs of each replica, with consecutive ranks on a node."""
    found: list[Placement] = []
    each = request.each
    for spot in spots:
        node = cluster.nodes[spot.node]
        if not each.gpus:
            own: list[tuple[str, ...]] = [()] * spot.replicas
        else:
            devices = cluster.devices(spot.node, each) & spot.devices
            bits = (part_bits if each.gpu_milli < WHOLE_GPU else whole_bits)(
                slots[spot.node], each, spot.replicas, devices, cluster, spot.node
            )
            own = [tuple([node.gpus[bit].id for bit in taken]) for taken in bits]
        for gpus in own:
            found.append(Placement(replica=len(found), node=node.name, gpus=gpus))
    return tuple(found)


def whole_bits(
    slot: NodeResources, each: Resources, replicas: int, devices: int, cluster: Cluster, node: int
) -> list[list[int]]:
    """Return devices for each replica, in order, from the tightest island that has enough left, else from any."""
    free, found = slot.gpus & devices, []
    for _ in range(replicas):
        pool = free
        if cluster.many_islands and each.gpus > 1:
            enough = [mask & free for mask in cluster.islands(node) if (mask & free).bit_count() >= each.gpus]
            pool = min(enough, key=lambda mask: (mask.bit_count(), mask)) if enough else free
        taken = [bit for bit in range(pool.bit_length()) if pool >> bit & 1][: each.gpus]
        found.append(taken)
        for bit in taken:
            free &= ~(1 << bit)
    return found


def part_bits(
    slot: NodeResources, each: Resources, replicas: int, devices: int, cluster: Cluster, node: int
) -> list[list[int]]:
    """Return for each replica the device with the least left that holds its part (best fit)."""
    parts, found = list(slot.parts), []
    for _ in range(replicas):
        holds = [(part[0], bit) for bit, part in enumerate(parts) if devices >> bit & 1 and times(part, each)]
        _, bit = min(holds)
        milli, memory, all_memory = parts[bit]
        taken, size = allocated_part(each, all_memory)
        parts[bit] = milli - taken, memory - size, all_memory
        found.append([bit])
    return found
