"""Where the replicas of a gang go: all of them, or nowhere; as close together as there is room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from falaj.records.scheduling.snapshot import WHOLE_GPU, Placement, Request, Resources
from falaj.scheduling.capacity.cluster import Cluster, allocated_part
from falaj.scheduling.capacity.resources import NodeResources

ALL_DEVICES = -1


class NodeAssignment(NamedTuple):
    """Some replicas on one node, which is told by its place in the order of the cluster, on some of its devices."""

    node: int
    replicas: int
    devices: int = ALL_DEVICES


Slots = Sequence[NodeResources]
Preference = Callable[[int, NodeResources], tuple[int, ...]]


def tightness(index: int, slot: NodeResources) -> tuple[int, ...]:
    """Small where little is free. GPUs count first, so that a job without GPUs leaves them to others."""
    return slot.gpus.bit_count(), slot.cpus, slot.memory, index


def by_index(index: int, slot: NodeResources) -> tuple[int, ...]:
    """Small for the first node: what others take beside a place that was found so does not move it."""
    return (index,)


def place_gang(
    request: Request,
    slots: Slots,
    permitted: Iterable[int],
    cluster: Cluster,
    prefer: Preference = tightness,
) -> list[NodeAssignment] | None:
    """Room for all replicas, or none: in one NVLink island, else on one node, else in one RDMA fabric, else anywhere.

    Of several, the one that `prefer` puts first. Replicas are alike, so counting how many fit on each node finds a
    place whenever there is one.
    """
    each, wanted, affinity = request.each, request.replicas, request.affinity
    rooms = [
        NodeAssignment(index, 1 if affinity.spread else count)
        for index in permitted
        if (count := capacity(slots[index], each, cluster.devices(index, each) if each.gpus else 0))
    ]
    whole = [] if affinity.spread and wanted > 1 else [spot.node for spot in rooms if spot.replicas >= wanted]
    if whole:
        found = in_an_island(request, slots, whole, cluster, prefer)
        if found or affinity.island == "nvlink":
            return found
        return [NodeAssignment(min(whole, key=lambda index: prefer(index, slots[index])), wanted)]
    if affinity.island == "nvlink" or sum(spot.replicas for spot in rooms) < wanted:
        return None
    in_order = roomiest if prefer is tightness else in_turn
    together = in_a_fabric(rooms, wanted, cluster, prefer)
    if together is None and affinity.island == "rdma":
        return None
    return in_order(together or rooms, wanted)


def capacity(slot: NodeResources, each: Resources, devices: int) -> int:
    """How many replicas fit, on these devices."""
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
    """How many such parts fit in what is free of one device."""
    free, memory, all_memory = part
    milli, size = allocated_part(each, all_memory)
    count = free // milli
    return max(min(count, memory // size) if size else count, 0)


# ---------------------------------------------------------------------------------------------- together


def in_an_island(
    request: Request, slots: Slots, nodes: Sequence[int], cluster: Cluster, prefer: Preference
) -> list[NodeAssignment] | None:
    """One NVLink island of one of these nodes; none if there is none, or if the job is not on several GPUs."""
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
    rooms: Sequence[NodeAssignment], wanted: int, cluster: Cluster, prefer: Preference
) -> list[NodeAssignment] | None:
    """The nodes of one RDMA fabric, if one has room enough: the one with the least."""
    by_fabric: dict[str, list[NodeAssignment]] = {}
    for spot in rooms:
        fabric = cluster.nodes[spot.node].fabric
        if fabric is not None:
            by_fabric.setdefault(fabric, []).append(spot)
    rooms_in = {name: sum(spot.replicas for spot in spots) for name, spots in by_fabric.items()}
    enough = [
        (count if prefer is tightness else 0, name) for name, count in rooms_in.items() if count >= wanted
    ]
    return by_fabric[min(enough)[1]] if enough else None


def roomiest(rooms: Sequence[NodeAssignment], wanted: int) -> list[NodeAssignment]:
    """As few nodes as possible."""
    return in_turn(sorted(rooms, key=lambda spot: (-spot.replicas, spot.node)), wanted)


def in_turn(rooms: Sequence[NodeAssignment], wanted: int) -> list[NodeAssignment]:
    spots = []
    for spot in rooms:
        spots.append(NodeAssignment(spot.node, min(spot.replicas, wanted)))
        wanted -= spots[-1].replicas
        if not wanted:
            break
    return spots


# ------------------------------------------------------------------------------------------------ devices


def placements(
    request: Request, spots: Sequence[NodeAssignment], slots: Slots, cluster: Cluster
) -> tuple[Placement, ...]:
    """Each replica's node and GPUs, ranks side by side on a node."""
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
    """Devices in their order, for each replica from one island if one has enough left: the fullest."""
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
    """For each replica the device with the least left that holds its part."""
    parts, found = list(slot.parts), []
    for _ in range(replicas):
        holds = [(part[0], bit) for bit, part in enumerate(parts) if devices >> bit & 1 and times(part, each)]
        _, bit = min(holds)
        milli, memory, all_memory = parts[bit]
        taken, size = allocated_part(each, all_memory)
        parts[bit] = milli - taken, memory - size, all_memory
        found.append([bit])
    return found
