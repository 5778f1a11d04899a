"""What is free on each node, GPU by GPU, for the schedulers that ours is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from falaj.records.scheduling.snapshot import WHOLE_GPU, Node, Placement, Request, Resources


class FreePlace(NamedTuple):
    """A node and GPUs of it, both told by their numbers."""

    node: int
    gpus: tuple[int, ...]


class NodeRoom:
    """One node. GPUs in thousandths that are free."""

    __slots__ = ("cpus", "gpus", "memory", "models", "shares")

    def __init__(self, node: Node) -> None:
        self.cpus, self.memory, self.shares = node.cpus, node.memory_bytes, node.shares
        self.models = [gpu.model for gpu in node.gpus]
        self.gpus = [WHOLE_GPU] * len(node.gpus)

    def copy(self) -> NodeRoom:
        twin = NodeRoom.__new__(NodeRoom)
        twin.cpus, twin.memory, twin.shares = self.cpus, self.memory, self.shares
        twin.models, twin.gpus = self.models, self.gpus.copy()
        return twin

    def find(self, each: Resources) -> tuple[int, ...] | None:
        """GPUs for one replica, the tightest that will do; none if it does not fit."""
        if each.cpus > self.cpus or each.memory_bytes > self.memory:
            return None
        if not each.gpus:
            return ()
        if each.gpu_milli < WHOLE_GPU and not self.shares:
            return None
        free = [
            (left, number)
            for number, left in enumerate(self.gpus)
            if left >= each.gpu_milli and (each.gpu_models is None or self.models[number] in each.gpu_models)
        ]
        return tuple(number for _, number in sorted(free)[: each.gpus]) if len(free) >= each.gpus else None

    def move(self, each: Resources, gpus: Iterable[int], sign: int) -> None:
        self.cpus += sign * each.cpus
        self.memory += sign * each.memory_bytes
        for number in gpus:
            self.gpus[number] += sign * each.gpu_milli

    def both(self, other: NodeRoom) -> NodeRoom:
        """What is free here and there."""
        found = self.copy()
        found.cpus, found.memory = min(self.cpus, other.cpus), min(self.memory, other.memory)
        found.gpus = [min(pair) for pair in zip(self.gpus, other.gpus, strict=True)]
        return found


class FreeNodes:
    def __init__(self, nodes: Sequence[Node]) -> None:
        self.rooms = [NodeRoom(node) for node in nodes]
        self._numbers = {node.name: number for number, node in enumerate(nodes)}
        self._gpus = [{gpu.id: number for number, gpu in enumerate(node.gpus)} for node in nodes]

    def copy(self) -> FreeNodes:
        return self._with([room.copy() for room in self.rooms])

    def both(self, other: FreeNodes) -> FreeNodes:
        return self._with([here.both(there) for here, there in zip(self.rooms, other.rooms, strict=True)])

    def refresh(self, places: Iterable[FreePlace], free: FreeNodes, then: FreeNodes) -> None:
        """These nodes again as what is free in both."""
        for node in {place.node for place in places}:
            self.rooms[node] = free.rooms[node].both(then.rooms[node])

    def places_of(self, given: Iterable[Placement]) -> list[FreePlace]:
        """Without those on nodes that are not there."""
        return [
            FreePlace(number, tuple(self._gpus[number][gpu] for gpu in placement.gpus))
            for placement in given
            if (number := self._numbers.get(placement.node)) is not None
        ]

    def take_all(self, each: Resources, places: Iterable[FreePlace]) -> None:
        for place in places:
            self.rooms[place.node].move(each, place.gpus, -1)

    def give_all(self, each: Resources, places: Iterable[FreePlace]) -> None:
        for place in places:
            self.rooms[place.node].move(each, place.gpus, 1)

    def place(self, request: Request) -> list[FreePlace] | None:
        """A place for every replica, or none; nothing is taken."""
        found: list[FreePlace] = []
        for _ in range(request.replicas):
            place = self._tightest(request.each)
            if place is None:
                break
            self.take_all(request.each, [place])
            found.append(place)
        self.give_all(request.each, found)
        return found if len(found) == request.replicas else None

    def _tightest(self, each: Resources) -> FreePlace | None:
        best, tightest = None, (1 << 62, 1 << 62)
        for number, room in enumerate(self.rooms):
            gpus = room.find(each)
            if gpus is not None and (left := (sum(room.gpus), room.cpus)) < tightest:
                best, tightest = FreePlace(number, gpus), left
        return best

    def _with(self, rooms: list[NodeRoom]) -> FreeNodes:
        twin = FreeNodes.__new__(FreeNodes)
        twin.rooms, twin._numbers, twin._gpus = rooms, self._numbers, self._gpus
        return twin


def placements(places: Sequence[FreePlace], nodes: Sequence[Node]) -> tuple[Placement, ...]:
    return tuple(
        Placement(
            replica=number,
            node=nodes[place.node].name,
            gpus=tuple(nodes[place.node].gpus[gpu].id for gpu in place.gpus),
        )
        for number, place in enumerate(places)
    )
