"""Preemption: who is evicted for whom, that it terminates, and that no eviction is wasted."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import strategies as st

from falaj.records.scheduling.snapshot import (
    Evict,
    Queue,
    Quota,
    Reason,
    Request,
    RunningJob,
    Snapshot,
    Start,
    Wait,
)
from falaj.scheduling import decide
from falaj.scheduling.capacity.resources import requested_amount
from workloads import (
    GIB,
    QUEUES,
    apply_decisions,
    competing_teams,
    entangled_teams,
    for_any,
    job,
    node,
    started,
    stop_leaving_jobs,
    with_pending,
    world,
    worlds,
)

Keys = list[tuple[int, int]]
TEAMS = [
    Queue(name="org", quota=Quota(cpus=8)),
    Queue(name="risk", quota=Quota(cpus=4), limit=Quota(cpus=8), parent="org"),
    Queue(name="fraud", quota=Quota(cpus=4), limit=Quota(cpus=8), parent="org"),
]


def evictions(snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    found = [decision for decision in decide(snapshot) if isinstance(decision, Evict)]
    return {decision.job: (decision.by, decision.why) for decision in found}


def starts(snapshot: Snapshot) -> list[str]:
    return [decision.job for decision in decide(snapshot) if isinstance(decision, Start)]


# ------------------------------------------------------------------------------------------------ examples


def lent(*pending: Request, borrowers: int = 4) -> Snapshot:
    """Return a cluster whose 8 CPUs are held by fraud, two by each job; half of them belong to risk."""
    full = [job(f"fraud-{i}", cpus=2, queue="fraud", age=9 - i) for i in range(borrowers)]
    return with_pending(started(world(node("n1", cpus=8), queues=TEAMS, pending=full)), *pending)


def test_a_queue_reclaims_its_quota_from_borrowers() -> None:
    snapshot = lent(job("ours", cpus=2, queue="risk"))

    assert [each.borrows for each in snapshot.running] == [False, False, True, True]
    assert evictions(snapshot) == {"fraud-3": ("ours", "reclaim")}
    waits = [decision for decision in decide(snapshot) if isinstance(decision, Wait)]
    assert waits == [Wait(job="ours", reason=Reason.PREEMPTING)]


def test_no_job_is_evicted_for_a_job_that_would_borrow() -> None:
    assert evictions(lent(job("ours", cpus=6, queue="risk"))) == {}


def test_no_job_within_its_quota_is_evicted_for_another_queue() -> None:
    snapshot = lent(job("first", cpus=2, queue="risk", age=2), job("second", cpus=2, queue="risk", age=1))
    third = with_pending(
        stop_leaving_jobs(apply_decisions(snapshot, decide(snapshot))), job("third", cpus=2, queue="risk")
    )

    assert evictions(snapshot) == {"fraud-3": ("first", "reclaim"), "fraud-2": ("second", "reclaim")}
    assert starts(third) == ["first", "second"]
    assert evictions(started(third)) == {}


def test_resources_of_leaving_jobs_are_reserved_for_the_claim() -> None:
    snapshot = lent(job("ours", cpus=2, queue="risk"))
    snapshot = apply_decisions(snapshot, decide(snapshot))
    left = stop_leaving_jobs(with_pending(snapshot, job("urgent", cpus=2, queue="fraud", priority=9, age=99)))

    assert starts(left) == ["ours"]


def test_no_job_takes_the_free_part_of_a_claimed_allocation() -> None:
    busy = started(world(node("n1", cpus=4), pending=[job("runs", cpus=2)]))
    claimed = with_pending(busy, job("urgent", cpus=4, priority=1), job("small", cpus=2, limit=1))
    waits = {"urgent": Reason.PREEMPTING, "small": Reason.RESERVED}

    for snapshot in (claimed, apply_decisions(claimed, decide(claimed))):
        answers = [decision for decision in decide(snapshot) if isinstance(decision, Wait)]
        assert {answer.job: answer.reason for answer in answers} == waits


def test_a_higher_priority_evicts_a_lower_one_of_its_own_queue_the_youngest_first() -> None:
    busy = started(world(node("n1", cpus=4), pending=[job("old", cpus=2, age=9)]))
    later = busy.model_copy(update={"now": busy.now.replace(hour=13)})
    busy = started(with_pending(later, job("young", cpus=2, age=1)))

    assert evictions(with_pending(busy, job("urgent", cpus=2, priority=1))) == {
        "young": ("urgent", "priority")
    }
    assert evictions(with_pending(busy, job("alike", cpus=2))) == {}


def test_a_job_of_another_queue_is_not_evicted_for_its_priority() -> None:
    queues = [Queue(name="default"), Queue(name="risk")]
    busy = started(world(node("n1", cpus=4), queues=queues, pending=[job("runs", cpus=4)]))

    assert evictions(with_pending(busy, job("urgent", cpus=2, queue="risk", priority=9))) == {}


def test_no_job_is_evicted_without_need() -> None:
    running = [job("small", cpus=1, age=1), job("large", cpus=3, age=2), job("other", cpus=4, age=3)]
    nodes = node("n1", cpus=4), node("n2", cpus=4, jurisdiction="DE")
    busy = started(world(*nodes, pending=running))

    there = {each.request.job: each.placements[0].node for each in busy.running}
    snapshot = with_pending(busy, job("urgent", cpus=3, priority=1, only=["DE"]))

    assert evictions(snapshot).keys() <= {name for name, where in there.items() if where == "n2"}
    assert len(evictions(snapshot)) == 1
    assert evictions(with_pending(busy, job("huge", cpus=5, priority=1))) == {}


def test_jobs_that_are_not_preemptible_stay() -> None:
    busy = started(world(node("n1", cpus=4), pending=[job("stays", cpus=4, preemptible=False)]))

    assert evictions(with_pending(busy, job("urgent", cpus=4, priority=9))) == {}


def test_equal_borrowers_do_not_evict_each_other() -> None:
    """Either queue is above its quota in what the other requests, and within it in its own request."""
    memory, gpus = Quota(cpus=9, gpus=0, memory_bytes=9 * GIB), Quota(cpus=9, gpus=9, memory_bytes=0)
    queues = [
        Queue(name="org", quota=Quota(cpus=0), limit=Quota()),
        Queue(name="risk", quota=memory, limit=Quota(), parent="org"),
        Queue(name="fraud", quota=gpus, limit=Quota(), parent="org"),
    ]
    holders = [job("risk-gpus", gpus=1, queue="risk"), job("fraud-memory", memory=1, queue="fraud")]
    first = started(world(node("n1", cpus=3, gpus=2), queues=queues, pending=holders))
    full = started(with_pending(first, job("with-gpus", gpus=1, queue="fraud")))

    snapshot = with_pending(full, job("with-memory", memory=1, queue="risk"))

    assert [each.borrows for each in full.running] == [True, True, True]
    assert evictions(snapshot) == {}


def test_a_claim_that_can_no_longer_be_met_evicts_no_more_jobs() -> None:
    busy = started(world(node("n1", cpus=4), node("n2", cpus=2), pending=[job("runs", cpus=2)]))
    claim = job("claim", cpus=4, priority=9, claim=True)
    lost = with_pending(busy.model_copy(update={"nodes": (node("n2", cpus=2),)}), claim)

    assert decide(lost) == (Wait(job="claim", reason=Reason.TOO_LARGE),)


# ---------------------------------------------------------------------------------------------- properties


def key(request: Request, borrows: bool) -> tuple[int, int]:
    return (0 if borrows else 1), request.priority


def keys_of(running: Iterable[RunningJob]) -> Keys:
    return sorted((key(each.request, each.borrows) for each in running), reverse=True)


@for_any(worlds() | competing_teams() | entangled_teams(), st.data())
def test_evictions_terminate_and_raise_the_rank_of_running_jobs(
    snapshot: Snapshot, data: st.DataObject
) -> None:
    """No job ends by itself; compared in the multiset order of Dershowitz and Manna, largest first."""
    weights = [keys_of(snapshot.running)]
    for _ in range(100):
        decisions = decide(snapshot)
        snapshot = apply_decisions(snapshot, decisions)
        if any(each.leaving for each in snapshot.running):
            if data.draw(st.booleans()):
                snapshot = stop_leaving_jobs(snapshot)
            continue
        if any(request.claim for request in snapshot.pending):
            continue
        if keys_of(snapshot.running) != weights[-1]:
            weights.append(keys_of(snapshot.running))
        if not any(isinstance(decision, Start | Evict) for decision in decisions):
            break
    else:
        raise AssertionError("it goes on and on")

    assert all(before < later for before, later in pairwise(weights))


@pytest.mark.slow
@for_any(worlds() | competing_teams() | entangled_teams())
def test_the_winner_of_an_eviction_ranks_above_each_victim(snapshot: Snapshot) -> None:
    running = {each.request.job: each for each in snapshot.running}
    evictions_made = [decision for decision in decide(snapshot) if isinstance(decision, Evict)]

    after = stop_leaving_jobs(apply_decisions(snapshot, decide(snapshot)))
    begun = {each.request.job: each for each in apply_decisions(after, decide(after)).running}

    for decision in evictions_made:
        victim, winner = running[decision.job], begun[decision.by]
        assert key(winner.request, winner.borrows) > key(victim.request, victim.borrows)


@pytest.mark.slow
@for_any(worlds() | competing_teams() | entangled_teams(), st.data())
def test_every_claim_is_met_despite_arrivals_during_eviction(snapshot: Snapshot, data: st.DataObject) -> None:
    """Victims leave one by one, while small jobs arrive that would fit in what is free already."""
    for _ in range(2):
        snapshot = apply_decisions(snapshot, decide(snapshot))
    claims = {request.job for request in snapshot.pending if request.claim}

    for step in range(100):
        leaving = sorted(each.request.job for each in snapshot.running if each.leaving)
        if not leaving:
            break
        one = after_one_left(snapshot, data.draw(st.sampled_from(leaving)))
        comes = [
            job(f"new-{step}-{i}", queue=queue, priority=priority, age=9)
            for i, (queue, priority) in enumerate(data.draw(arrivals))
        ]
        claims |= {request.job for request in one.pending if request.claim}
        after = apply_decisions(with_pending(one, *comes), decide(with_pending(one, *comes)))
        snapshot = after

    assert claims <= {each.request.job for each in snapshot.running}


arrivals = st.lists(st.tuples(st.sampled_from(QUEUES), st.sampled_from([0, 0, 1])), max_size=2)


def after_one_left(snapshot: Snapshot, name: str) -> Snapshot:
    gone = tuple(each.request for each in snapshot.running if each.request.job == name)
    left = tuple(each for each in snapshot.running if each.request.job != name)
    update: dict[str, Any] = {"running": left, "pending": (*snapshot.pending, *gone)}
    return snapshot.model_copy(update=update)


@pytest.mark.slow
@for_any(st.lists(st.integers(1, 3), min_size=2, max_size=6), st.integers(2, 12), st.randoms())
def test_no_job_takes_part_of_a_claimed_allocation(
    sizes: list[int], requested: int, random: st.random.Random
) -> None:
    """Several victims leave for one job, in any order; after each, jobs arrive that would fit in what it left."""
    running = [job(f"runs-{i}", cpus=size, age=9) for i, size in enumerate(sizes)]
    queues = [Queue(name="default"), Queue(name="risk")]
    full = started(world(node("n1", cpus=sum(sizes)), queues=queues, pending=running))
    snapshot = with_pending(full, job("urgent", cpus=min(requested, sum(sizes)), priority=1))
    snapshot = apply_decisions(snapshot, decide(snapshot))
    leaving = [each.request.job for each in snapshot.running if each.leaving]
    random.shuffle(leaving)

    for step, name in enumerate(leaving):
        comes = [
            job(f"{queue}-{step}", queue=queue, age=99, limit=limit)
            for queue, limit in (("default", 1), ("risk", None))
        ]
        snapshot = with_pending(after_one_left(snapshot, name), *comes)
        snapshot = apply_decisions(snapshot, decide(snapshot))

    assert "urgent" in {each.request.job for each in snapshot.running}


@pytest.mark.slow
@for_any(worlds() | competing_teams() | entangled_teams())
def test_only_borrowers_from_a_branch_over_its_quota_are_evicted(snapshot: Snapshot) -> None:
    queues = {queue.name: queue for queue in snapshot.queues}
    running = {each.request.job: each for each in snapshot.running}

    for decision in decide(snapshot):
        if isinstance(decision, Evict) and decision.why == "reclaim":
            victim = running[decision.job]
            assert victim.borrows
            assert any(over_quota(snapshot, name) for name in path(queues, victim.request.queue))


def path(queues: dict[str, Queue], name: str | None) -> list[str]:
    return [] if name is None else [name, *path(queues, queues[name].parent)]


def over_quota(snapshot: Snapshot, name: str) -> bool:
    queues = {queue.name: queue for queue in snapshot.queues}
    held = [
        requested_amount(each.request)
        for each in snapshot.running
        if name in path(queues, each.request.queue)
    ]
    quota = queues[name].quota
    bounds = (quota.cpus, None if quota.gpus is None else quota.gpus * 1000, quota.memory_bytes)
    sums = [sum(column) for column in zip(*held, strict=True)]
    return any(bound is not None and has > bound for has, bound in zip(sums, bounds, strict=True))
