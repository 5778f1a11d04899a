"""Amounts of resources on a node and in total, as plain integers, for speed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from falaj.records.scheduling.snapshot import WHOLE_GPU, Quota, Request, Resources

UNLIMITED = 1 << 80
END_OF_TIME = datetime.max.replace(tzinfo=UTC)
SLICES_OF_A_GPU = 7

GpuParts = tuple[tuple[int, int, int], ...]


class NodeResources(NamedTuple):
    """Resources free or held on one node, exact to the device: bit i of `gpus` is device i, a GPU or a MIG slice.

    On a node with shared GPUs, `parts` has the thousandths, the bytes and the total bytes of each device. There a bit
    is set if the device is entirely free, or if any of it is held. ResourceAmount is a total without devices.
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
        """Return whether `asked` is free."""
        if asked.cpus > self.cpus or asked.memory > self.memory:
            return False
        if not asked.parts:
            return asked.gpus & ~self.gpus == 0
        return all(m >= n and b >= c for (m, b, _), (n, c, _) in zip(self.parts, asked.parts, strict=True))

    def both(self, other: NodeResources) -> NodeResources:
        """Return what is free in both."""
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
    """A total of CPUs, GPUs and memory: of a job, a quota or the cluster. It does not say on which nodes."""

    cpus: int = 0
    gpus_milli: int = 0
    memory: int = 0

    @property
    def gpus(self) -> float:
        """Return the number of GPUs, with fractions."""
        return self.gpus_milli / WHOLE_GPU

    def holds(self, used: ResourceAmount, asked: ResourceAmount) -> bool:
        """Return whether `used` and `asked` fit in this. A resource that is not asked for is not checked."""
        return (
            used.cpus + asked.cpus <= self.cpus
            and (not asked.gpus_milli or used.gpus_milli + asked.gpus_milli <= self.gpus_milli)
            and (not asked.memory or used.memory + asked.memory <= self.memory)
        )

    def less(self, other: ResourceAmount) -> ResourceAmount:
        return ResourceAmount(
            self.cpus - other.cpus, self.gpus_milli - other.gpus_milli, self.memory - other.memory
        )

    def plus(self, other: ResourceAmount) -> ResourceAmount:
        return ResourceAmount(
            self.cpus + other.cpus, self.gpus_milli + other.gpus_milli, self.memory + other.memory
        )

    def most(self, other: ResourceAmount) -> ResourceAmount:
        return ResourceAmount(
            max(self.cpus, other.cpus),
            max(self.gpus_milli, other.gpus_milli),
            max(self.memory, other.memory),
        )


NOTHING = ResourceAmount()


def dominant_share(held: Iterable[float], total: Iterable[float]) -> float:
    """Return the largest share of any resource (DRF); a resource that the cluster does not have counts 0.

    Both list CPUs, GPUs and memory in that order and in the same units.
    """
    return max([part / of for part, of in zip(held, total, strict=True) if of], default=0.0)


def requested_amount(request: Request) -> ResourceAmount:
    """Return what all replicas hold together."""
    each, replicas = request.each, request.replicas
    return ResourceAmount(
        each.cpus * replicas, gpu_thousandths(each) * replicas, each.memory_bytes * replicas
    )


def gpu_thousandths(each: Resources) -> int:
    """Return the GPUs of one replica; a MIG slice counts by its sevenths of a card."""
    if not each.gpus:
        return 0
    return each.gpus * (slice_thousandths(each.gpu_profile) if each.gpu_profile else each.gpu_milli)


@lru_cache(maxsize=256)
def slice_thousandths(profile: str) -> int:
    """Return two sevenths for a profile like 2g.20gb, a quarter for 1/4, and a whole GPU for an unknown format."""
    if shared := re.fullmatch(r"1/([1-9]\d{0,2})", profile):
        return max(1, WHOLE_GPU // int(shared[1]))
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
    """Return the sort key within a queue: priority, then submission, then id, so that no two are equal."""
    return -request.priority, request.submitted_at, request.job


class Allocation(NamedTuple):
    """What one running job holds. Rank breaks ties between jobs that started at the same time."""

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
        """Return whether its end is known."""
        return self.ends_by != END_OF_TIME

    @property
    def age(self) -> tuple[datetime, Rank]:
        return self.started_at, self.rank

    @property
    def key(self) -> tuple[int, int]:
        """Return the order of preemption; docs/decisions/0012 says why preemption cannot cycle."""
        return (0 if self.borrows else 1), self.request.priority
