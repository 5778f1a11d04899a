"""Invariants of all decisions, for any cluster, queues and jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st

from falaj.records.scheduling.snapshot import (
    WHOLE_GPU,
    Decision,
    Evict,
    Queue,
    Quota,
    Reason,
    RunningJob,
    Snapshot,
    Start,
    Wait,
)
from falaj.scheduling import decide
from falaj.scheduling.capacity.cluster import Cluster, allocated_part
from falaj.scheduling.capacity.free_capacity import FreeCapacity
from falaj.scheduling.capacity.resources import requested_amount
from falaj.scheduling.decision.scheduling_round import MOMENT
from falaj.scheduling.placement.gang_placement import place_gang
from workloads import QUEUES, apply_decisions, competing_teams, for_any, jobs, nodes, world, worlds


def running_then(snapshot: Snapshot) -> tuple[RunningJob, ...]:
    return apply_decisions(snapshot, decide(snapshot)).running


@pytest.mark.slow
@for_any(worlds() | competing_teams())
def test_no_node_is_overcommitted(snapshot: Snapshot) -> None:
    cpus: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    for running in running_then(snapshot):
        for placement in running.placements:
            cpus[placement.node] += running.request.each.cpus
            memory[placement.node] += running.request.each.memory_bytes

    there = {node.name: node for node in snapshot.nodes}

    assert all(count <= there[name].cpus for name, count in cpus.items())
    assert all(size <= there[name].memory_bytes for name, size in memory.items())


@pytest.mark.slow
@for_any(worlds() | competing_teams())
def test_no_gpu_is_overcommitted_in_compute_or_memory(snapshot: Snapshot) -> None:
    cards = {(node.name, gpu.id): gpu for node in snapshot.nodes for gpu in node.gpus}
    milli: Counter[tuple[str, str]] = Counter()
    memory: Counter[tuple[str, str]] = Counter()
    for running in running_then(snapshot):
        for placement in running.placements:
            for gpu in placement.gpus:
                part, size = allocated_part(running.request.each, cards[placement.node, gpu].memory_bytes)
                milli[placement.node, gpu] += part
                memory[placement.node, gpu] += size

    assert milli.keys() <= cards.keys()
    assert all(held <= WHOLE_GPU for held in milli.values())
    assert all(held <= cards[card].memory_bytes for card, held in memory.items())


@pytest.mark.slow
@for_any(worlds() | competing_teams())
def test_the_gpus_of_a_replica_are_of_the_kind_that_it_asked_for(snapshot: Snapshot) -> None:
    there = {node.name: node for node in snapshot.nodes}
    for running in running_then(snapshot):
        each = running.request.each
        for placement in running.placements:
            node = there[placement.node]
            for gpu in (gpu for gpu in node.gpus if gpu.id in placement.gpus):
                assert gpu.profile == each.gpu_profile
                assert each.gpu_models is None or gpu.model in each.gpu_models
                assert each.gpu_milli == WHOLE_GPU or node.shares


@pytest.mark.slow
@for_any(worlds() | competing_teams())
def test_a_gang_starts_whole_or_not_at_all(snapshot: Snapshot) -> None:
    requests = {request.job: request for request in snapshot.pending}

    for decision in decide(snapshot):
        if isinstance(decision, Start):
            request = requests[decision.job]
            assert [placement.replica for placement in decision.placements] == list(range(request.replicas))
            assert {len(placement.gpus) for placement in decision.placements} == {request.each.gpus}


@for_any(worlds() | competing_teams())
def test_no_queue_holds_more_than_its_limit_nor_lends_out_its_quota_for_good(snapshot: Snapshot) -> None:
    parents = {queue.name: queue.parent for queue in snapshot.queues}
    used: Counter[tuple[str, str]] = Counter()
    lasting: Counter[tuple[str, str]] = Counter()
    for running in running_then(snapshot):
        amounts = dict(zip(("cpus", "gpus", "memory_bytes"), requested_amount(running.request), strict=True))
        queue: str | None = running.request.queue
        while queue is not None:
            for resource, amount in amounts.items():
                used[queue, resource] += amount
                lasting[queue, resource] += 0 if running.borrows else amount
            queue = parents[queue]

    for each in snapshot.queues:
        for resource in ("cpus", "gpus", "memory_bytes"):
            unit = WHOLE_GPU if resource == "gpus" else 1
            limit, own = getattr(each.limit or each.quota, resource), getattr(each.quota, resource)
            assert limit is None or used[each.name, resource] <= limit * unit
            assert own is None or lasting[each.name, resource] <= own * unit


@pytest.mark.slow
@for_any(worlds() | competing_teams())
def test_no_job_is_placed_against_its_label_or_affinity(snapshot: Snapshot) -> None:
    there = {node.name: node for node in snapshot.nodes}

    for running in running_then(snapshot):
        request, affinity = running.request, running.request.affinity
        on = [there[placement.node] for placement in running.placements]
        for node in on:
            assert request.label.permits(node.jurisdiction)
            assert not affinity.pools or node.pool in affinity.pools
            assert not affinity.avoid & node.labels
        assert not affinity.spread or len({node.name for node in on}) == request.replicas
        assert affinity.island is None or len({node.name for node in on}) == 1 or same_fabric(on)


def same_fabric(on: list) -> bool:  # type: ignore[type-arg]
    return len({node.fabric for node in on}) == 1 and on[0].fabric is not None


@pytest.mark.slow
@for_any(worlds() | competing_teams())
def test_anti_affinity_is_respected(snapshot: Snapshot) -> None:
    after = running_then(snapshot)
    loud = {place.node for each in after if each.request.group == "loud" for place in each.placements}

    for running in after:
        if running.request.affinity.apart and running.request.group != "loud":
            assert not loud & {place.node for place in running.placements}


@for_any(worlds() | competing_teams())
def test_a_job_that_is_not_preemptible_never_borrows_and_is_never_evicted(snapshot: Snapshot) -> None:
    stays = {each.request.job for each in snapshot.running if not each.request.preemptible}
    stays |= {request.job for request in snapshot.pending if not request.preemptible}

    for decision in decide(snapshot):
        assert not (isinstance(decision, Start) and decision.borrows and decision.job in stays)
        assert not (isinstance(decision, Evict) and decision.job in stays)


@for_any(worlds() | competing_teams(), st.randoms())
def test_the_order_of_the_input_changes_nothing(snapshot: Snapshot, random: st.random.Random) -> None:
    parts = {name: list(getattr(snapshot, name)) for name in ("nodes", "queues", "pending", "running")}
    for part in parts.values():
        random.shuffle(part)
    shuffled = snapshot.model_copy(update={name: tuple(part) for name, part in parts.items()})

    assert decide(shuffled) == decide(snapshot)


@pytest.mark.slow
@for_any(worlds() | competing_teams())
def test_every_pending_job_gets_one_decision(snapshot: Snapshot) -> None:
    answered = [decision.job for decision in decide(snapshot) if not isinstance(decision, Evict)]

    assert sorted(answered) == sorted(request.job for request in snapshot.pending)


@pytest.mark.slow
@for_any(worlds() | competing_teams())
def test_deciding_again_starts_no_other_job(snapshot: Snapshot) -> None:
    decisions = decide(snapshot)
    after = one_after_the_other(apply_decisions(snapshot, decisions), decisions)

    # A claimant may start before its victims are gone, where both fit.
    claims = {request.job for request in after.pending if request.claim}
    assert not [each for each in decide(after) if isinstance(each, Start) and each.job not in claims]


def one_after_the_other(snapshot: Snapshot, decisions: Sequence[Decision]) -> Snapshot:
    """Check that jobs started by these decisions did so in their order, as the reconciler starts them."""
    order = [decision.job for decision in decisions if isinstance(decision, Start)]
    moments = {job: snapshot.now + (place + 1) * MOMENT for place, job in enumerate(order)}
    running = tuple(
        each.model_copy(update={"started_at": moments.get(each.request.job, each.started_at)})
        for each in snapshot.running
    )
    return snapshot.model_copy(update={"running": running})


@pytest.mark.slow
@for_any(worlds() | competing_teams())
def test_no_job_waits_for_free_capacity(snapshot: Snapshot) -> None:
    decisions = decide(snapshot)
    after = apply_decisions(snapshot, decisions)
    cluster = Cluster(snapshot.nodes, after.running)
    capacity_now = FreeCapacity(cluster, [cluster.held_by(each) for each in after.running])
    requests = {request.job: request for request in snapshot.pending}

    for decision in decisions:
        if isinstance(decision, Wait) and decision.reason is Reason.CAPACITY:
            request = requests[decision.job]
            assert place_gang(request, capacity_now.unallocated, cluster.permitted(request), cluster) is None


@for_any(nodes, jobs("p", most=1, limits=st.none(), simple=True))
def test_a_job_that_fits_alone_starts_when_all_is_idle(cluster: list, only: list) -> None:  # type: ignore[type-arg]
    snapshot = world(*cluster, pending=only, queues=[Queue(name=name, quota=Quota()) for name in QUEUES])

    for request in only:
        each = request.each
        fitting = 0
        for node in cluster:
            counts = [node.cpus // each.cpus]
            cards = sum(gpu.profile is None for gpu in node.gpus)
            counts += [cards // each.gpus] if each.gpus else []
            counts += [node.memory_bytes // each.memory_bytes] if each.memory_bytes else []
            fitting += min(counts) if request.label.permits(node.jurisdiction) else 0
        (decision,) = decide(snapshot)
        assert isinstance(decision, Start) is (fitting >= request.replicas)


@pytest.mark.slow
@for_any(worlds() | competing_teams())
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
