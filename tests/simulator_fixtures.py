"""Small clusters, jobs and schedulers for tests of the simulator, with figures that can be checked by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta

from falaj.records.names import ObjectId
from falaj.records.scheduling.simulation import Assumptions, PastJob, SimulatedCluster
from falaj.records.scheduling.snapshot import (
    Decision,
    Evict,
    Gpu,
    Node,
    Placement,
    Queue,
    Quota,
    Reason,
    Request,
    Resources,
    Snapshot,
    Start,
    Wait,
)

MIDNIGHT = datetime(2026, 3, 2, tzinfo=UTC)
GIB = 2**30


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


def at(count: float) -> datetime:
    return MIDNIGHT + minutes(count)


def machine(name: str = "n1", *, gpus: int = 1, cpus: int = 64, model: str = "H200") -> Node:
    cards = tuple(Gpu(id=f"{name}-{i}", model=model, memory_bytes=GIB) for i in range(gpus))
    return Node(name=name, zone="local", jurisdiction="AE", cpus=cpus, memory_bytes=1024 * GIB, gpus=cards)


def past(
    name: str,
    came: float,
    lasts: float,
    *,
    gpus: int = 1,
    queue: str = "default",
    replicas: int = 1,
    priority: int = 0,
    limit: float | None = None,
    workspace: str | None = None,
    waited: float | None = None,
) -> PastJob:
    """Return a job that came at minute `came` and lasts that many minutes."""
    request = Request(
        job=ObjectId(name),
        queue=queue,
        replicas=replicas,
        each=Resources(gpus=gpus),
        priority=priority,
        submitted_at=at(came),
        time_limit=None if limit is None else minutes(limit),
        workspace=None if workspace is None else ObjectId(workspace),
    )
    return PastJob(
        request=request, duration=minutes(lasts), waited=None if waited is None else minutes(waited)
    )


def team(name: str, gpus: int | None = None, **other: object) -> Queue:
    return Queue.model_validate({"name": name, "quota": Quota(gpus=gpus)} | other)


def world_of(
    *nodes: Node, queues: Iterable[Queue] = (), assume: Assumptions | None = None
) -> SimulatedCluster:
    return SimulatedCluster(
        nodes=nodes or (machine(),),
        queues=tuple(queues) or (team("default"),),
        assume=assume or Assumptions(),
    )


def many(seed: int, count: int, *, queues: tuple[str, ...] = ("default",)) -> list[PastJob]:
    """Return jobs drawn from `seed`, more than one small node can run at once."""
    draw = random.Random(seed)
    return [
        past(
            f"job-{number:04}",
            draw.uniform(0, count),
            draw.choice([0, 1, 2, 5, 10]),
            gpus=draw.choice([0, 1, 1, 2]),
            replicas=draw.choice([1, 1, 2]),
            queue=draw.choice(queues),
            priority=draw.choice([0, 0, 1]),
            limit=draw.choice([None, 3, 20]),
        )
        for number in range(count)
    ]


# ------------------------------------------------------------------------------------------- schedulers


def one_by_one(snapshot: Snapshot) -> list[Decision]:
    """Schedule one job at a time on the first GPU of the first node; a higher priority evicts at once."""
    waiting = sorted(snapshot.pending, key=lambda each: (not each.claim, -each.priority, each.submitted_at))
    first, *others = waiting
    decisions: list[Decision] = [Wait(job=each.job, reason=Reason.CAPACITY) for each in others]
    if not snapshot.running and snapshot.nodes:
        node = snapshot.nodes[0]
        placement = Placement(replica=0, node=node.name, gpus=(node.gpus[0].id,))
        return [Start(job=first.job, placements=(placement,)), *decisions]
    here = snapshot.running[0] if snapshot.running else None
    if here and not here.leaving and first.priority > here.request.priority:
        decisions.append(Evict(job=here.request.job, by=first.job, why="priority"))
    return [Wait(job=first.job, reason=Reason.CAPACITY), *decisions]


class RecordingScheduler:
    """A scheduler that records its snapshots."""

    def __init__(self, scheduler: Callable[[Snapshot], Iterable[Decision]]) -> None:
        self.scheduler = scheduler
        self.seen: list[Snapshot] = []

    def __call__(self, snapshot: Snapshot) -> Iterable[Decision]:
        self.seen.append(snapshot)
        return self.scheduler(snapshot)
