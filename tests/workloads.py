"""Clusters, queues and jobs for tests of scheduling: explicit, drawn at random, and simulated on a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.records.governance.residency import Label
from falaj.records.names import ObjectId
from falaj.records.scheduling.snapshot import (
    Affinity,
    Decision,
    Evict,
    Gpu,
    Node,
    Queue,
    Quota,
    Request,
    Resources,
    RunningJob,
    Snapshot,
    Start,
)
from falaj.scheduling import decide

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
GIB = 2**30
Decide = Callable[[Snapshot], Sequence[Decision]]


def minutes(count: int) -> timedelta:
    return timedelta(minutes=count)


# --------------------------------------------------------------------------------------------- explicit


def node(
    name: str,
    *,
    cpus: int = 8,
    gpus: int = 0,
    memory: int = 64,
    jurisdiction: str = "AE",
    model: str = "H200",
    islands: int = 1,
    slices: int = 0,
    **other: Any,
) -> Node:
    """Return a node whose GPUs are in that many NVLink islands, followed by MIG slices."""
    cards = [
        Gpu(id=f"GPU-{name}-{i}", model=model, memory_bytes=141 * GIB, island=i * islands // gpus)
        for i in range(gpus)
    ]
    cut = [
        Gpu(id=f"MIG-{name}-{i}", model=model, memory_bytes=18 * GIB, island=islands, profile="1g.18gb")
        for i in range(slices)
    ]
    return Node(
        name=name,
        zone="abu-dhabi" if jurisdiction == "AE" else "frankfurt",
        jurisdiction=jurisdiction,
        cpus=cpus,
        memory_bytes=memory * GIB,
        gpus=(*cards, *cut),
        **other,
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
    gpu: Mapping[str, Any] | None = None,
    **other: Any,
) -> Request:
    """Return a request that is `age` minutes old at noon and may run for `limit` minutes; `gpu` refines its GPUs."""
    return Request(
        job=ObjectId(name),
        each=Resources(cpus=cpus, gpus=gpus, memory_bytes=memory * GIB, **(gpu or {})),
        submitted_at=NOON - minutes(age),
        label=Label(only=None if only is None else frozenset(only)),
        time_limit=None if limit is None else minutes(limit),
        **other,
    )


def world(
    *nodes: Node,
    pending: Sequence[Request] = (),
    running: Sequence[RunningJob] = (),
    queues: Sequence[Queue] = (Queue(name="default"),),
    **other: Any,
) -> Snapshot:
    return Snapshot(
        now=NOON, nodes=nodes, queues=tuple(queues), pending=tuple(pending), running=tuple(running), **other
    )


def started(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot after all jobs that can start now have started."""
    return apply_decisions(snapshot, decide(snapshot))


def with_pending(snapshot: Snapshot, *pending: Request) -> Snapshot:
    return snapshot.model_copy(update={"pending": snapshot.pending + pending})


# -------------------------------------------------------------------------------------- drawn at random


def for_any(*drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a property test without a deadline, since its time on a busy machine means nothing."""
    return lambda test: settings(deadline=None)(given(*drawn)(test))


nodes = st.lists(
    st.builds(
        dict,
        cpus=st.integers(1, 8),
        gpus=st.integers(0, 4),
        memory=st.integers(0, 8),
        jurisdiction=st.sampled_from(["AE", "AE", "DE"]),
        model=st.sampled_from(["H200", "H200", "A100"]),
        islands=st.sampled_from([1, 1, 2]),
        slices=st.sampled_from([0, 0, 0, 2]),
        shares=st.booleans(),
        fabric=st.sampled_from([None, "ib0"]),
        pool=st.sampled_from(["default", "default", "cpus"]),
        labels=st.sampled_from([frozenset(), frozenset({"fast"})]),
    ),
    min_size=1,
    max_size=4,
).map(lambda given: [node(f"n{i}", **each) for i, each in enumerate(given)])
bound = st.none() | st.none() | st.integers(0, 12)


def quota_of(cpus: int | None, gpus: int | None, memory: int | None) -> Quota:
    return Quota(cpus=cpus, gpus=gpus, memory_bytes=None if memory is None else memory * GIB)


quotas = st.builds(quota_of, bound, bound, bound)
QUEUES = ("default", "risk")
"""Queues of the drawn jobs; they may have a common parent."""


@st.composite
def trees(draw: st.DrawFn, *, quota: st.SearchStrategy[Quota] = quotas) -> list[Queue]:
    """Draw queues, some of them under a parent, with or without borrowing."""
    parent = draw(st.sampled_from([None, "org"]))
    names = [*QUEUES, "org"] if parent else [*QUEUES]
    found = []
    for name in names:
        own = draw(quota)
        more = draw(st.none() | st.integers(0, 8))
        limit = None if more is None else larger(own, by=more)
        above = parent if name != "org" else None
        weight, history = draw(st.sampled_from([1.0, 1.0, 2.0])), draw(st.sampled_from([0.0, 0.0, 0.3]))
        found.append(Queue(name=name, quota=own, limit=limit, parent=above, weight=weight, history=history))
    return found


def larger(quota: Quota, *, by: int) -> Quota:
    """Return the same queue with larger bounds."""
    cpus, gpus, memory = quota.cpus, quota.gpus, quota.memory_bytes
    return Quota(
        cpus=None if cpus is None else cpus + by,
        gpus=None if gpus is None else gpus + by,
        memory_bytes=None if memory is None else memory + by * GIB,
    )


kinds_of_gpu = st.sampled_from(
    [
        (0, None),
        (0, None),
        (1, None),
        (2, None),
        (4, None),
        (1, {"gpu_milli": 300}),
        (1, {"gpu_milli": 600, "gpu_memory_bytes": 80 * GIB}),
        (1, {"gpu_profile": "1g.18gb"}),
        (1, {"gpu_models": frozenset({"A100"})}),
    ]
)
affinities = st.sampled_from(
    [
        Affinity(),
        Affinity(),
        Affinity(),
        Affinity(),
        Affinity(pools=frozenset({"cpus"})),
        Affinity(avoid=frozenset({"fast"})),
        Affinity(apart=frozenset({"loud"})),
        Affinity(spread=True),
        Affinity(island="nvlink"),
        Affinity(island="rdma"),
    ]
)


def jobs(
    prefix: str, *, most: int, limits: st.SearchStrategy[int | None], simple: bool = False
) -> st.SearchStrategy[list[Request]]:
    """Draw jobs; `simple`: all in one queue, without affinity, and never evicted."""
    one = st.builds(
        dict,
        cpus=st.integers(1, 5),
        kind=st.sampled_from([(0, None), (1, None), (2, None), (4, None)]) if simple else kinds_of_gpu,
        memory=st.sampled_from([0, 0, 1, 4]),
        replicas=st.sampled_from([1, 1, 1, 2, 3]),
        only=st.sampled_from([None, None, None, None, ("AE",), ("DE",), ()]),
        limit=limits,
        age=st.integers(0, 3),
        priority=st.integers(-1, 2),
        queue=st.sampled_from(QUEUES[:1] if simple else QUEUES),
        preemptible=st.just(False) if simple else st.sampled_from([True, True, True, False]),
        affinity=st.just(Affinity()) if simple else affinities,
        group=st.none() if simple else st.sampled_from([None, None, "loud"]),
    )

    def build(name: str, kind: tuple[int, Mapping[str, Any] | None], **other: Any) -> Request:
        return job(name, gpus=kind[0], gpu=kind[1], **other)

    return st.lists(one, max_size=most).map(
        lambda given: [build(f"{prefix}{i}", **each) for i, each in enumerate(given)]
    )


@st.composite
def worlds(
    draw: st.DrawFn,
    *,
    limits: st.SearchStrategy[int | None] = st.none() | st.integers(2, 60),  # noqa: B008
    quota: st.SearchStrategy[Quota] = quotas,
    most: int = 12,
    simple: bool = False,
) -> Snapshot:
    """Draw a cluster with running and waiting jobs; `simple`: all in one queue, and none evicted."""
    queues = [Queue(name=QUEUES[0], quota=draw(quota))] if simple else draw(trees(quota=quota))
    before = draw(jobs("r", most=6, limits=limits, simple=simple))
    earlier = world(*draw(nodes), queues=queues, pending=before)
    running = started(earlier.model_copy(update={"now": NOON - minutes(1)})).running
    waiting = tuple(draw(jobs("p", most=most, limits=limits, simple=simple)))
    return earlier.model_copy(update={"running": running, "pending": waiting})


@st.composite
def competing_teams(draw: st.DrawFn, *, limits: st.SearchStrategy[int | None] = st.none()) -> Snapshot:  # noqa: B008
    """Draw two teams that lend each other idle quota, one of which has filled the nodes alone."""
    shares, more = draw(st.tuples(st.integers(1, 6), st.integers(1, 6))), draw(st.integers(0, 10))
    own = [Quota(cpus=share) for share in shares]
    org = Queue(
        name="org", quota=Quota(cpus=sum(shares)), limit=draw(st.sampled_from([None, Quota(cpus=16)]))
    )
    teams = [
        Queue(
            name=name,
            quota=quota,
            limit=larger(quota, by=more),
            parent="org",
            weight=draw(st.sampled_from([1, 2])),
        )
        for name, quota in zip(QUEUES, own, strict=True)
    ]
    machines = [
        node(f"n{i}", cpus=draw(st.integers(2, 8)), gpus=draw(st.integers(0, 2)), shares=True)
        for i in range(draw(st.integers(1, 3)))
    ]
    first = draw(contenders("r", queues=[draw(st.sampled_from(QUEUES))], limits=limits))
    second = draw(contenders("s", queues=QUEUES, limits=limits))
    earlier = world(*machines, queues=[org, *teams], pending=first)
    running = started(earlier.model_copy(update={"now": NOON - minutes(2)}))
    running = started(with_pending(running.model_copy(update={"now": NOON - minutes(1)}), *second))
    pending = tuple(request for request in running.pending if not request.claim)
    left = tuple(each.model_copy(update={"leaving": False}) for each in running.running)
    waiting = (*pending, *draw(contenders("p", queues=QUEUES, limits=limits)))
    return running.model_copy(update={"now": NOON, "running": left, "pending": waiting})


@st.composite
def entangled_teams(draw: st.DrawFn) -> Snapshot:
    """Draw teams that are each above their quota in another resource, so that they may want to evict each other."""
    amounts = st.integers(0, 4)
    own = [quota_of(draw(st.integers(1, 6)), draw(amounts), draw(amounts)) for _ in QUEUES]
    pairs = zip(QUEUES, own, strict=True)
    teams = [Queue(name=name, quota=quota, limit=Quota(), parent="org") for name, quota in pairs]
    org = Queue(name="org", quota=quota_of(draw(st.integers(0, 3)), None, None), limit=Quota())
    sizes = draw(st.lists(st.tuples(st.integers(2, 6), st.integers(0, 4)), min_size=1, max_size=2))
    machines = [node(f"n{i}", cpus=cpus, gpus=gpus, memory=8) for i, (cpus, gpus) in enumerate(sizes)]
    one = st.builds(
        dict,
        cpus=st.integers(1, 3),
        gpus=st.sampled_from([0, 0, 1, 2]),
        memory=st.sampled_from([0, 0, 2, 4]),
        age=st.integers(0, 3),
        priority=st.sampled_from([0, 0, 0, 1]),
        queue=st.sampled_from(QUEUES),
        preemptible=st.sampled_from([True, True, True, True, False]),
    )
    drawn = draw(st.lists(one, min_size=2, max_size=10))
    requests = [job(f"j{i}", **each) for i, each in enumerate(drawn)]
    early = draw(st.integers(0, len(requests)))
    earlier = world(*machines, queues=[org, *teams], pending=requests[:early])
    running = started(earlier.model_copy(update={"now": NOON - minutes(1)})).running
    running = tuple(each for each in running if draw(st.booleans()) or draw(st.booleans()))
    there = {each.request.job for each in running}
    pending = tuple(request for request in requests if request.job not in there)
    return earlier.model_copy(update={"running": running, "pending": pending})


def contenders(
    prefix: str, *, queues: Sequence[str], limits: st.SearchStrategy[int | None]
) -> st.SearchStrategy[list[Request]]:
    one = st.builds(
        dict,
        cpus=st.integers(1, 3),
        gpus=st.sampled_from([0, 0, 0, 1]),
        replicas=st.sampled_from([1, 1, 1, 2]),
        age=st.integers(0, 3),
        limit=limits,
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        queue=st.sampled_from(queues),
        preemptible=st.sampled_from([True, True, True, True, False]),
    )
    return st.lists(one, min_size=1, max_size=6).map(
        lambda given: [job(f"{prefix}{i}", **each) for i, each in enumerate(given)]
    )


# -------------------------------------------------------------------------------------------- simulated


def apply_decisions(snapshot: Snapshot, decisions: Iterable[Decision]) -> Snapshot:
    """Apply the decisions: start jobs, mark victims as leaving, and give their claimants a claim."""
    requests = {request.job: request for request in snapshot.pending}
    evicted: set[str] = set()
    new = []
    for decision in decisions:
        if isinstance(decision, Start):
            request = requests.pop(decision.job).model_copy(update={"claim": False})
            new.append(
                RunningJob(
                    request=request,
                    placements=decision.placements,
                    started_at=snapshot.now,
                    ends_by=request.time_limit and snapshot.now + request.time_limit,
                    borrows=decision.borrows,
                )
            )
        elif isinstance(decision, Evict):
            evicted.add(decision.job)
            requests[decision.by] = requests[decision.by].model_copy(update={"claim": True})
    running = tuple(
        each.model_copy(update={"leaving": True}) if each.request.job in evicted else each
        for each in snapshot.running
    )
    return snapshot.model_copy(update={"running": (*running, *new), "pending": tuple(requests.values())})


def stop_leaving_jobs(snapshot: Snapshot) -> Snapshot:
    """Let the leaving jobs stop and return to their queues."""
    gone = tuple(each.request for each in snapshot.running if each.leaving)
    left = tuple(each for each in snapshot.running if not each.leaving)
    return snapshot.model_copy(update={"running": left, "pending": snapshot.pending + gone})


def simulate_starts(
    snapshot: Snapshot, lasts: Mapping[str, timedelta], *, decide: Decide = decide
) -> dict[str, datetime]:
    """Return when each job first starts, if each lasts as `lasts` says, until no job waits or none runs.

    An evicted job stops at once, and starts again later.
    """
    starts: dict[str, datetime] = {}
    for _ in range(10_000):
        snapshot = apply_decisions(snapshot, decide(snapshot))
        starts = {each.request.job: each.started_at for each in snapshot.running} | starts
        if any(each.leaving for each in snapshot.running):
            snapshot = stop_leaving_jobs(snapshot)
            continue
        if not snapshot.running or not snapshot.pending:
            return starts
        ends = {each.request.job: each.started_at + lasts[each.request.job] for each in snapshot.running}
        now = min(ends.values())
        left = tuple(each for each in snapshot.running if ends[each.request.job] > now)
        snapshot = snapshot.model_copy(update={"now": now, "running": left})
    raise AssertionError("it goes on and on")
