"""The waiting jobs, grouped by queue and shape, so that a scheduling round need not visit each of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple

from falaj.records.scheduling.snapshot import Affinity, Request
from falaj.scheduling.capacity.cluster import NO_AFFINITY
from falaj.scheduling.capacity.resources import Rank, rank


class RequestShape(NamedTuple):
    """The part of a request that decides whether it fits, apart from its queue and priority."""

    replicas: int
    each: tuple[object, ...]
    only: frozenset[str] | None
    time_limit: timedelta | None
    preemptible: bool
    workspace: str | None
    group: str | None
    affinity: tuple[object, ...]


WaitingJob = tuple[Rank, Request]
WaitingJobs = list[WaitingJob]


class Backlog:
    """The waiting jobs by queue and shape, each group sorted by rank.

    It can be kept across scheduling rounds: `add` submitted jobs, `remove` started or cancelled ones. It leads to the
    same decisions as a snapshot with the same pending jobs. Its size is linear in the number of jobs.
    """

    def __init__(self, pending: Iterable[Request] = ()) -> None:
        self.queues: dict[str, dict[RequestShape, WaitingJobs]] = {}
        self.claims: WaitingJobs = []
        self._size = 0
        for request in pending:
            self._group_of(request).append((rank(request), request))
            self._size += 1
        self.claims.sort()
        for groups in self.queues.values():
            for group in groups.values():
                group.sort()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        for _, request in self.claims:
            yield request
        for groups in self.queues.values():
            for group in groups.values():
                for _, request in group:
                    yield request

    def add(self, request: Request) -> None:
        insort(self._group_of(request), (rank(request), request))
        self._size += 1

    def remove(self, request: Request) -> None:
        group = self._group_of(request)
        place = bisect_left(group, (rank(request),))
        if place == len(group) or group[place][1].job != request.job:
            raise KeyError(request.job)
        del group[place]
        self._size -= 1
        if not group and not request.claim:
            groups = self.queues[request.queue]
            del groups[shape_of(request)]
            if not groups:
                del self.queues[request.queue]

    def in_order(self, queue: str) -> WaitingJobs:
        """Return the jobs of a queue that have no preemption claim, sorted by rank."""
        return sorted(entry for group in self.queues.get(queue, {}).values() for entry in group)

    def _group_of(self, request: Request) -> WaitingJobs:
        if request.claim:
            return self.claims
        groups = self.queues.setdefault(request.queue, {})
        shape = shape_of(request)
        group = groups.get(shape)
        if group is None:
            group = groups[shape] = []
        return group


def shape_of(request: Request) -> RequestShape:
    each, affinity = request.each, request.affinity
    return RequestShape(
        request.replicas,
        (
            each.cpus,
            each.gpus,
            each.memory_bytes,
            each.gpu_milli,
            each.gpu_memory_bytes,
            each.gpu_models,
            each.gpu_profile,
        ),
        request.label.only,
        request.time_limit,
        request.preemptible,
        request.workspace,
        request.group,
        NO_AFFINITY_KEY if affinity is NO_AFFINITY else affinity_key(affinity),
    )


def affinity_key(affinity: Affinity) -> tuple[object, ...]:
    return (
        affinity.pools,
        affinity.labels,
        affinity.avoid,
        affinity.near,
        affinity.apart,
        affinity.spread,
        affinity.island,
    )


NO_AFFINITY_KEY = affinity_key(NO_AFFINITY)
