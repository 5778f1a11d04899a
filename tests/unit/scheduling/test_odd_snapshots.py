"""Inconsistent snapshots are decided safely: nothing is allocated twice, and no job is forgotten."""

from __future__ import annotations

from datetime import timedelta

import pytest

from falaj.records.scheduling.snapshot import Evict, Queue, Quota, Reason, RunningJob, Snapshot, Start, Wait
from falaj.scheduling import decide, expected_start, explain
from workloads import (
    NOON,
    apply_decisions,
    competing_teams,
    entangled_teams,
    for_any,
    job,
    minutes,
    node,
    started,
    stop_leaving_jobs,
    with_pending,
    world,
    worlds,
)

HUGE = 2**53


def starts(snapshot: Snapshot) -> list[str]:
    return [each.job for each in decide(snapshot) if isinstance(each, Start)]


def at(running: RunningJob, **other: object) -> RunningJob:
    return running.model_copy(update=other)


def test_a_job_that_has_overrun_its_limit_may_end_any_moment() -> None:
    busy = started(world(node("n1", cpus=4), pending=[job("late", cpus=4, limit=10)]))
    later = with_pending(
        busy.model_copy(update={"now": NOON + minutes(60)}), job("head", cpus=4), job("small", limit=1)
    )

    assert decide(later) == (
        Wait(job="head", reason=Reason.CAPACITY),
        Wait(job="small", reason=Reason.CAPACITY),
    )
    assert expected_start(later, "head") == NOON + minutes(60)


@pytest.mark.parametrize("moved", [timedelta(days=-400), timedelta(days=400)])
def test_a_clock_jump_starts_no_job_twice_and_evicts_no_equal(moved: timedelta) -> None:
    busy = started(world(node("n1", cpus=4), pending=[job("runs", cpus=2, limit=10), job("more", cpus=2)]))
    moment = with_pending(busy.model_copy(update={"now": NOON + moved}), job("next", cpus=2))

    assert decide(moment) == (Wait(job="next", reason=Reason.CAPACITY),)
    assert explain(moment, "next").position == 1


def test_a_gang_that_lost_a_node_keeps_its_other_nodes() -> None:
    gang = started(world(node("n1", cpus=2), node("n2", cpus=2), pending=[job("gang", cpus=2, replicas=2)]))
    lost = gang.model_copy(update={"nodes": (node("n2", cpus=2),)})

    assert starts(with_pending(lost, job("next", cpus=1))) == []


def test_a_node_that_shrank_below_its_jobs_takes_no_more() -> None:
    busy = started(world(node("n1", cpus=8, gpus=2), pending=[job("runs", cpus=8, gpus=2)]))
    small = busy.model_copy(update={"nodes": (node("n1", cpus=4, gpus=1), node("n2", cpus=1))})

    assert starts(with_pending(small, job("next", cpus=1), job("gpu", gpus=1), job("two", cpus=2))) == [
        "next"
    ]


def test_a_cycle_of_queues_blocks_no_job() -> None:
    sound = world(
        node("n1", cpus=4),
        queues=[Queue(name="a", quota=Quota(cpus=2)), Queue(name="b"), Queue(name="default")],
        pending=[job("in-ring", queue="a"), job("other")],
    )
    ring = tuple(
        queue.model_copy(update={"parent": {"a": "b", "b": "a"}.get(queue.name)}) for queue in sound.queues
    )

    snapshot = sound.model_copy(update={"queues": ring})

    assert sorted(each.job for each in decide(snapshot)) == ["in-ring", "other"]
    assert "other" in starts(snapshot)


@pytest.mark.slow
def test_huge_figures_are_counted_exactly() -> None:
    machine = node("n1", cpus=8).model_copy(update={"cpus": HUGE, "memory_bytes": HUGE})
    pending = [job("gang", cpus=1_000_000, replicas=1_000_000), job("one")]
    snapshot = world(machine, queues=[Queue(name="default", quota=Quota(cpus=10**12))], pending=pending)

    assert starts(snapshot) == ["gang"]


def test_a_claim_of_a_closed_queue_or_spent_budget_blocks_no_other() -> None:
    busy = started(world(node("n1", cpus=4), pending=[job("runs", cpus=2)]))
    lost = job("lost", cpus=2, queue="gone", claim=True)

    assert decide(with_pending(busy, lost, job("next", cpus=2)))[0] == Wait(
        job="lost", reason=Reason.NO_QUEUE
    )
    assert starts(with_pending(busy, lost, job("next", cpus=2))) == ["next"]


def test_a_claim_without_leaving_jobs_waits_and_starts_like_others() -> None:
    """Its victims were cancelled, and their resources were taken while the controller was away."""
    busy = started(world(node("n1", cpus=4), pending=[job("taken", cpus=4, preemptible=False)]))
    claim = job("claim", cpus=4, claim=True)

    assert decide(with_pending(busy, claim)) == (Wait(job="claim", reason=Reason.CAPACITY),)
    assert starts(with_pending(busy.model_copy(update={"running": ()}), claim)) == ["claim"]


@for_any(worlds() | competing_teams() | entangled_teams())
def test_an_evicted_job_is_evicted_once_and_the_claimant_starts(snapshot: Snapshot) -> None:
    """Over three rounds in which no victim has left, and then once all have."""
    evicted: list[str] = []
    for _ in range(3):
        decisions = decide(snapshot)
        running = {each.request.job for each in snapshot.running if not each.leaving}
        new = [each.job for each in decisions if isinstance(each, Evict)]
        assert set(new) <= running
        evicted += new
        snapshot = apply_decisions(snapshot, decisions)
    assert len(evicted) == len(set(evicted))

    claims = {request.job for request in snapshot.pending if request.claim}
    assert claims <= set(starts(stop_leaving_jobs(snapshot)))
