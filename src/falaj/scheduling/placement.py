"""Where the replicas of a gang go: all of them, or nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from falaj.records.scheduling import Node, Placement, Request, Resources
from falaj.scheduling.ledger import Slot


class Spot(NamedTuple):
    """Some replicas on one node, which is told by its place in the order of the cluster."""

    node: int
    replicas: int


def place(request: Request, slots: Sequence[Slot], permitted: Sequence[int]) -> list[Spot] | None:
    """Nodes for all replicas, or none.

    On one node if one can hold them all: the one that is left with the fewest free GPUs, then CPUs. Else on as few
    nodes as possible. Replicas are alike, so counting how many fit on each node finds a place whenever there is one.
    """
    each, wanted = request.each, request.replicas
    rooms = [Spot(index, count) for index in permitted if (count := capacity(slots[index], each))]
    whole = [spot.node for spot in rooms if spot.replicas >= wanted]
    if whole:
        return [Spot(min(whole, key=lambda index: (tightness(slots[index]), index)), wanted)]
    if sum(spot.replicas for spot in rooms) < wanted:
        return None
    return spread(rooms, wanted)


def capacity(slot: Slot, each: Resources) -> int:
    """How many replicas fit."""
    count = slot.cpus // each.cpus
    if each.memory_bytes:
        count = min(count, slot.memory // each.memory_bytes)
    if each.gpus:
        count = min(count, slot.gpus.bit_count() // each.gpus)
    return max(count, 0)


def tightness(slot: Slot) -> tuple[int, int, int]:
    """Small where little is free. GPUs count first, so that a job without GPUs leaves them to others."""
    return slot.gpus.bit_count(), slot.cpus, slot.memory


def spread(rooms: list[Spot], wanted: int) -> list[Spot]:
    """The roomiest nodes first."""
    spots = []
    for spot in sorted(rooms, key=lambda spot: (-spot.replicas, spot.node)):
        spots.append(Spot(spot.node, min(spot.replicas, wanted)))
        wanted -= spots[-1].replicas
        if not wanted:
            break
    return spots


def placements(
    request: Request, spots: Sequence[Spot], slots: Sequence[Slot], nodes: Sequence[Node]
) -> tuple[Placement, ...]:
    """Each replica's node and GPUs, ranks side by side on a node."""
    found: list[Placement] = []
    gpus = request.each.gpus
    for spot in spots:
        node, free = nodes[spot.node], slots[spot.node].gpus
        ids = [gpu.id for bit, gpu in enumerate(node.gpus) if free >> bit & 1] if gpus else []
        for turn in range(spot.replicas):
            own = tuple(ids[turn * gpus : (turn + 1) * gpus])
            found.append(Placement(replica=len(found), node=node.name, gpus=own))
    return tuple(found)
