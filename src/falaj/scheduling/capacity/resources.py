"""What is free or held, on a node and in a queue, as plain integers that are quick to count with."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from falaj.records.scheduling.snapshot import WHOLE_GPU, Quota, Request, Resources

UNLIMITED = 1 << 80
END_OF_TIME = datetime.max.replace(tzinfo=UTC)
SLICES_OF_A_GPU = 7

GpuParts = tuple[tuple[int, int, int], ...]


class NodeResources(NamedTuple):
    """What is free on one node, or held on it; bit i of `gpus` stands for its device i, a whole GPU or a slice.

    On a node whose GPUs are had in parts, `parts` are the thousandths and the memory of each device, and the memory
    that it has in all; there a bit is set if all of the device is free, or if any of it is held.
    """

    cpus: int
    memory: int
    gpus: int
    parts: GpuParts = ()

    def take(self, held: NodeResources) -> NodeResources:
        cpus, memory, gpus = self.cpus - held.cpus, self.memory - held.memory, self.gpus & ~held.gpus
        if not held.parts or not self.parts:
            return NodeResources(cpus, memory, gpus, self.parts)
        pairs = zip(self.parts, held.parts, strict=True)
        return NodeResources(
            cpus, memory, gpus, tuple([(m - n, b - c, all_of_it) for (m, b, all_of_it), (n, c, _) in pairs])
        )

    def give(self, held: NodeResources) -> NodeResources:
        cpus, memory = self.cpus + held.cpus, self.memory + held.memory
        if not held.parts or not self.parts:
            return NodeResources(cpus, memory, self.gpus | held.gpus, self.parts)
        pairs = zip(self.parts, held.parts, strict=True)
        parts = tuple([(m + n, b + c, all_of_it) for (m, b, all_of_it), (n, c, _) in pairs])
        whole = sum(1 << bit for bit, (milli, _, _) in enumerate(parts) if milli >= WHOLE_GPU)
        return NodeResources(cpus, memory, self.gpus | (held.gpus & whole), parts)

    def covers(self, asked: NodeResources) -> bool:
        """Whether so much is free."""
        if asked.cpus > self.cpus or asked.memory > self.memory:
            return False
        if not asked.parts:
            return asked.gpus & ~self.gpus == 0
        return all(m >= n and b >= c for (m, b, _), (n, c, _) in zip(self.parts, asked.parts, strict=True))

    def both(self, other: NodeResources) -> NodeResources:
        """What is free here and there."""
        if self is other:
            return self
        pairs = zip(self.parts, other.parts, strict=True)
        return NodeResources(
            min(self.cpus, other.cpus),
            min(self.memory, other.memory),
            self.gpus & other.gpus,
            tuple([(min(m, n), min(b, c), all_of_it) for (m, b, all_of_it), (n, c, _) in pairs]),
        )


class ResourceAmount(NamedTuple):
    """A sum of resources, for quotas; GPUs in thousandths."""

    cpus: int
    gpus: int
    memory: int

    def holds(self, used: ResourceAmount, asked: ResourceAmount) -> bool:
        """Whether `asked` fits in this beside what is used. Who asks for none of a resource is not held up by it."""
        return (
            used.cpus + asked.cpus <= self.cpus
            and (not asked.gpus or used.gpus + asked.gpus <= self.gpus)
            and (not asked.memory or used.memory + asked.memory <= self.memory)
        )

    def less(self, other: ResourceAmount) -> ResourceAmount:
        return ResourceAmount(self.cpus - other.cpus, self.gpus - other.gpus, self.memory - other.memory)

    def plus(self, other: ResourceAmount) -> ResourceAmount:
        return ResourceAmount(self.cpus + other.cpus, self.gpus + other.gpus, self.memory + other.memory)

    def most(self, other: ResourceAmount) -> ResourceAmount:
        return ResourceAmount(
            max(self.cpus, other.cpus), max(self.gpus, other.gpus), max(self.memory, other.memory)
        )


NOTHING = ResourceAmount(0, 0, 0)


def requested_amount(request: Request) -> ResourceAmount:
    """What the whole gang holds."""
    each, replicas = request.each, request.replicas
    return ResourceAmount(
        each.cpus * replicas, gpu_thousandths(each) * replicas, each.memory_bytes * replicas
    )


def gpu_thousandths(each: Resources) -> int:
    """The GPUs of one replica; a slice counts by its sevenths of a card."""
    if not each.gpus:
        return 0
    return each.gpus * (slice_thousandths(each.gpu_profile) if each.gpu_profile else each.gpu_milli)


@lru_cache(maxsize=256)
def slice_thousandths(profile: str) -> int:
    """Of a profile like 2g.20gb, two sevenths; of one that says nothing of the kind, all."""
    found = re.match(r"(\d+)g\b", profile)
    return min(int(found[1]) * WHOLE_GPU // SLICES_OF_A_GPU, WHOLE_GPU) if found else WHOLE_GPU


def quota_amount(quota: Quota) -> ResourceAmount:
    cpus, gpus, memory = quota.cpus, quota.gpus, quota.memory_bytes
    return ResourceAmount(
        UNLIMITED if cpus is None else cpus,
        UNLIMITED if gpus is None else gpus * WHOLE_GPU,
        UNLIMITED if memory is None else memory,
    )


Rank = tuple[int, datetime, str]


def rank(request: Request) -> Rank:
    """Whose turn comes first in a queue: priority, then submission, then the name, so that no two are equal."""
    return -request.priority, request.submitted_at, request.job


class Allocation(NamedTuple):
    """What one running job holds. Jobs that started at one moment are as old as their ranks say."""

    ends_by: datetime
    started_at: datetime
    rank: Rank
    request: Request
    amount: ResourceAmount
    on: tuple[tuple[int, NodeResources], ...]
    borrows: bool = False
    leaving: bool = False

    @property
    def ends(self) -> bool:
        """Whether its end is known."""
        return self.ends_by != END_OF_TIME

    @property
    def age(self) -> tuple[datetime, Rank]:
        return self.started_at, self.rank

    @property
    def key(self) -> tuple[int, int]:
        """How much it weighs when room is made; docs/decisions/0012 says why this ends."""
        return (0 if self.borrows else 1), self.request.priority
