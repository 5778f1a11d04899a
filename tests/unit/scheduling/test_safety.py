"""What no decision may ever do, whatever the cluster, the queues and the jobs."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from falaj.records.scheduling import Queue, Quota, Running, Snapshot, Start
from falaj.scheduling import decide
from workloads import QUEUES, carry_out, for_any, jobs, nodes, world, worlds


def running_then(snapshot: Snapshot) -> tuple[Running, ...]:
    return carry_out(snapshot, decide(snapshot)).running


@for_any(worlds())
def test_no_node_holds_more_than_it_has(snapshot: Snapshot) -> None:
    cpus: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    gpus: Counter[tuple[str, str]] = Counter()
    for running in running_then(snapshot):
        for placement in running.placements:
            cpus[placement.node] += running.request.each.cpus
            memory[placement.node] += running.request.each.memory_bytes
            gpus.update((placement.node, gpu) for gpu in placement.gpus)

    there = {node.name: node for node in snapshot.nodes}
    cards = {(node.name, gpu.id) for node in snapshot.nodes for gpu in node.gpus}

    assert all(count <= there[name].cpus for name, count in cpus.items())
    assert all(size <= there[name].memory_bytes for name, size in memory.items())
    assert gpus.keys() <= cards
    assert set(gpus.values()) <= {1}


@for_any(worlds())
def test_a_gang_starts_whole_or_not_at_all(snapshot: Snapshot) -> None:
    asked = {request.job: request for request in snapshot.pending}

    for decision in decide(snapshot):
        if isinstance(decision, Start):
            request = asked[decision.job]
            assert [placement.replica for placement in decision.placements] == list(range(request.replicas))
            assert {len(placement.gpus) for placement in decision.placements} == {request.each.gpus}


@for_any(worlds())
def test_no_queue_holds_more_than_its_quota(snapshot: Snapshot) -> None:
    used: Counter[tuple[str, str]] = Counter()
    for running in running_then(snapshot):
        request = running.request
        used[request.queue, "cpus"] += request.each.cpus * request.replicas
        used[request.queue, "gpus"] += request.each.gpus * request.replicas
        used[request.queue, "memory_bytes"] += request.each.memory_bytes * request.replicas

    for queue in snapshot.queues:
        for resource, most in queue.quota.model_dump().items():
            assert most is None or used[queue.name, resource] <= most


@for_any(worlds())
def test_no_job_lands_where_its_label_forbids(snapshot: Snapshot) -> None:
    where = {node.name: node.jurisdiction for node in snapshot.nodes}

    for running in running_then(snapshot):
        for placement in running.placements:
            assert running.request.label.permits(where[placement.node])


@for_any(worlds(), st.randoms())
def test_the_order_of_the_input_changes_nothing(snapshot: Snapshot, random: st.random.Random) -> None:
    parts = {name: list(getattr(snapshot, name)) for name in ("nodes", "queues", "pending", "running")}
    for part in parts.values():
        random.shuffle(part)
    shuffled = snapshot.model_copy(update={name: tuple(part) for name, part in parts.items()})

    assert decide(shuffled) == decide(snapshot)


@for_any(worlds())
def test_every_pending_job_gets_one_decision(snapshot: Snapshot) -> None:
    decided = [decision.job for decision in decide(snapshot)]

    assert sorted(decided) == sorted(request.job for request in snapshot.pending)


@for_any(worlds())
def test_deciding_again_starts_nobody_else(snapshot: Snapshot) -> None:
    after = carry_out(snapshot, decide(snapshot))

    assert not [decision for decision in decide(after) if isinstance(decision, Start)]


@for_any(nodes, jobs("p", most=1, limits=st.none()))
def test_a_job_that_fits_alone_starts_when_all_is_idle(cluster: list, only: list) -> None:  # type: ignore[type-arg]
    snapshot = world(*cluster, pending=only, queues=[Queue(name=name, quota=Quota()) for name in QUEUES])

    for request in only:
        each = request.each
        room = 0
        for node in cluster:
            counts = [node.cpus // each.cpus]
            counts += [len(node.gpus) // each.gpus] if each.gpus else []
            counts += [node.memory_bytes // each.memory_bytes] if each.memory_bytes else []
            room += min(counts) if request.label.permits(node.jurisdiction) else 0
        (decision,) = decide(snapshot)
        assert isinstance(decision, Start) is (room >= request.replicas)


@for_any(worlds())
def test_an_idle_cluster_starts_the_first_job_that_can_run_at_all(snapshot: Snapshot) -> None:
    idle = snapshot.model_copy(update={"running": ()})

    decisions = decide(idle)

    alone = [
        decision.job
        for decision in decisions
        for request in idle.pending
        if request.job == decision.job
        if isinstance(decide(idle.model_copy(update={"pending": (request,)}))[0], Start)
    ]
    starts = [decision.job for decision in decisions if isinstance(decision, Start)]
    assert starts[:1] == alone[:1]
