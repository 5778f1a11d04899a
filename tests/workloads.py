"""Clusters, queues and jobs for tests of scheduling: written out, drawn at random, and played through on a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.records.names import ObjectId
from falaj.records.residency import Label
from falaj.records.scheduling import (
    Decision,
    Gpu,
    Node,
    Queue,
    Quota,
    Request,
    Resources,
    Running,
    Snapshot,
    Start,
)
from falaj.scheduling import decide

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
GIB = 2**30
Decide = Callable[[Snapshot], Sequence[Decision]]


def minutes(count: int) -> timedelta:
    return timedelta(minutes=count)


# ------------------------------------------------------------------------------------------ written out


def node(name: str, *, cpus: int = 8, gpus: int = 0, memory: int = 64, jurisdiction: str = "AE") -> Node:
    cards = tuple(Gpu(id=f"GPU-{name}-{i}", model="H200", memory_bytes=141 * GIB) for i in range(gpus))
    zone = "abu-dhabi" if jurisdiction == "AE" else "frankfurt"
    return Node(
        name=name, zone=zone, jurisdiction=jurisdiction, cpus=cpus, memory_bytes=memory * GIB, gpus=cards
    )


def job(
    name: str,
    *,
    cpus: int = 1,
    gpus: int = 0,
    memory: int = 0,
    only: Iterable[str] | None = None,
    limit: int | None = None,
    age: int = 0,
    **other: Any,
) -> Request:
    """A request that is `age` minutes old at noon and may run for `limit` minutes."""
    return Request(
        job=ObjectId(name),
        each=Resources(cpus=cpus, gpus=gpus, memory_bytes=memory * GIB),
        submitted_at=NOON - minutes(age),
        label=Label(only=None if only is None else frozenset(only)),
        time_limit=None if limit is None else minutes(limit),
        **other,
    )


def world(
    *nodes: Node,
    pending: Sequence[Request] = (),
    running: Sequence[Running] = (),
    queues: Sequence[Queue] = (Queue(name="default"),),
) -> Snapshot:
    return Snapshot(
        now=NOON, nodes=nodes, queues=tuple(queues), pending=tuple(pending), running=tuple(running)
    )


def started(snapshot: Snapshot) -> Snapshot:
    """The snapshot in which all that can start now has started."""
    return carry_out(snapshot, decide(snapshot))


def with_pending(snapshot: Snapshot, *pending: Request) -> Snapshot:
    return snapshot.model_copy(update={"pending": snapshot.pending + pending})


# ------------------------------------------------------------------------------------------------ drawn


def for_any(*drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test holds for whatever is drawn; how long it takes on a busy machine says nothing."""
    return lambda test: settings(deadline=None)(given(*drawn)(test))


small = st.integers(min_value=0, max_value=4)
nodes = st.lists(
    st.builds(
        dict,
        cpus=st.integers(1, 8),
        gpus=small,
        memory=st.integers(0, 8),
        jurisdiction=st.sampled_from(["AE", "DE"]),
    ),
    min_size=1,
    max_size=4,
).map(lambda given: [node(f"n{i}", **each) for i, each in enumerate(given)])
bound = st.none() | st.integers(0, 12)
quotas = st.builds(
    lambda cpus, gpus, memory: Quota(
        cpus=cpus, gpus=gpus, memory_bytes=None if memory is None else memory * GIB
    ),
    bound,
    bound,
    bound,
)
QUEUES = ("default", "risk")


def jobs(
    prefix: str, *, most: int, limits: st.SearchStrategy[int | None]
) -> st.SearchStrategy[list[Request]]:
    one = st.builds(
        dict,
        cpus=st.integers(1, 5),
        gpus=st.sampled_from([0, 0, 1, 2, 4]),
        memory=st.sampled_from([0, 0, 1, 4]),
        replicas=st.sampled_from([1, 1, 1, 2, 3]),
        only=st.sampled_from([None, None, ("AE",), ("DE",), ()]),
        limit=limits,
        age=st.integers(0, 3),
        priority=st.integers(-1, 2),
        queue=st.sampled_from(QUEUES),
    )
    return st.lists(one, max_size=most).map(
        lambda given: [job(f"{prefix}{i}", **each) for i, each in enumerate(given)]
    )


@st.composite
def worlds(
    draw: st.DrawFn,
    *,
    limits: st.SearchStrategy[int | None] = st.none() | st.integers(2, 60),  # noqa: B008
    quota: st.SearchStrategy[Quota] = quotas,
    most: int = 12,
) -> Snapshot:
    """A cluster on which some jobs run, and others wait."""
    queues = [Queue(name=name, quota=draw(quota)) for name in QUEUES]
    first = world(*draw(nodes), queues=queues, pending=draw(jobs("r", most=6, limits=limits)))
    earlier = first.model_copy(update={"now": NOON - minutes(1)})
    running = started(earlier).running
    return first.model_copy(
        update={"running": running, "pending": tuple(draw(jobs("p", most=most, limits=limits)))}
    )


# ----------------------------------------------------------------------------------------------- played


def carry_out(snapshot: Snapshot, decisions: Iterable[Decision]) -> Snapshot:
    """Start what is to start."""
    asked = {request.job: request for request in snapshot.pending}
    new = tuple(
        Running(
            request=(request := asked.pop(decision.job)),
            placements=decision.placements,
            started_at=snapshot.now,
            ends_by=request.time_limit and snapshot.now + request.time_limit,
        )
        for decision in decisions
        if isinstance(decision, Start)
    )
    return snapshot.model_copy(update={"running": snapshot.running + new, "pending": tuple(asked.values())})


def play(
    snapshot: Snapshot, lasts: Mapping[str, timedelta], *, decide: Decide = decide
) -> dict[str, datetime]:
    """When each job starts, if each lasts as `lasts` says; until nobody waits or nothing runs."""
    starts: dict[str, datetime] = {}
    while True:
        snapshot = carry_out(snapshot, decide(snapshot))
        starts |= {each.request.job: each.started_at for each in snapshot.running}
        if not snapshot.running or not snapshot.pending:
            return starts
        ends = {each.request.job: each.started_at + lasts[each.request.job] for each in snapshot.running}
        now = min(ends.values())
        left = tuple(each for each in snapshot.running if ends[each.request.job] > now)
        snapshot = snapshot.model_copy(update={"now": now, "running": left})
