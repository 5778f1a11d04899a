"""The order of queues, borrowing, and budgets of workspaces."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from falaj.records.scheduling.snapshot import (
    Budget,
    Price,
    Queue,
    Quota,
    Reason,
    Request,
    Snapshot,
    Start,
    Wait,
)
from falaj.scheduling import decide, explain
from workloads import job, minutes, node, started, with_pending, world


def starts(snapshot: Snapshot) -> dict[str, bool]:
    """Return the jobs that start, in order, and whether each borrows."""
    return {each.job: each.borrows for each in decide(snapshot) if isinstance(each, Start)}


def reasons(snapshot: Snapshot) -> dict[str, Reason]:
    return {each.job: each.reason for each in decide(snapshot) if isinstance(each, Wait)}


def of(queue: str, *names: str, cpus: int = 1) -> list[Request]:
    return [job(name, queue=queue, cpus=cpus, age=9 - place) for place, name in enumerate(names)]


# ------------------------------------------------------------------------------------------------- shares


def test_queues_take_turns_by_their_usage() -> None:
    queues = [Queue(name="a"), Queue(name="b")]
    pending = [*of("a", "a1", "a2", "a3"), *of("b", "b1", "b2", cpus=2)]

    assert [*starts(world(node("n1"), queues=queues, pending=pending))] == ["a1", "b1", "a2", "a3", "b2"]


def test_a_queue_of_twice_the_weight_gets_twice_as_much() -> None:
    queues = [Queue(name="a"), Queue(name="b", weight=2)]
    pending = [*of("a", *(f"a{i}" for i in range(9))), *of("b", *(f"b{i}" for i in range(9)))]

    begun = [*starts(world(node("n1", cpus=9), queues=queues, pending=pending))]

    assert sorted(name[0] for name in begun) == ["a"] * 3 + ["b"] * 6


def test_a_queue_with_high_recent_usage_goes_later() -> None:
    queues = [Queue(name="a", history=0.5), Queue(name="b")]
    pending = [*of("a", "a1"), *of("b", *(f"b{i}" for i in range(9)))]

    assert [*starts(world(node("n1", cpus=8), queues=queues, pending=pending))] == [
        "b0",
        "b1",
        "b2",
        "b3",
        "a1",
        "b4",
        "b5",
        "b6",
    ]


def test_the_share_of_a_branch_counts_before_that_of_its_queues() -> None:
    queues = [
        Queue(name="large"),
        Queue(name="l1", parent="large"),
        Queue(name="l2", parent="large"),
        Queue(name="small"),
    ]
    pending = [*of("l1", "l1a", "l1b"), *of("l2", "l2a", "l2b"), *of("small", "s1", "s2")]

    assert [*starts(world(node("n1"), queues=queues, pending=pending))] == [
        "l1a",
        "s1",
        "l2a",
        "s2",
        "l1b",
        "l2b",
    ]


def test_the_scarcest_resource_decides_the_share() -> None:
    queues = [Queue(name="a"), Queue(name="b")]
    busy = started(
        world(
            node("n1", cpus=16, gpus=4),
            queues=queues,
            pending=[job("g", gpus=2, queue="a"), *of("b", "c", cpus=4)],
        )
    )

    assert [*starts(with_pending(busy, *of("a", "a1"), *of("b", "b1")))] == ["b1", "a1"]
    assert explain(busy, "g").share == pytest.approx(0.5)
    assert explain(busy, "c").share == pytest.approx(0.25)


def test_an_inner_queue_has_jobs_of_its_own() -> None:
    queues = [Queue(name="org", quota=Quota(cpus=6)), Queue(name="a", quota=Quota(cpus=4), parent="org")]
    pending = [*of("org", "o1", "o2", "o3"), *of("a", "a1", "a2")]

    assert starts(world(node("n1"), queues=queues, pending=pending)) == {
        "a1": False,
        "o1": False,
        "a2": False,
        "o2": False,
        "o3": True,
    }


# ------------------------------------------------------------------------------------------------- quotas

LENDING = [
    Queue(name="org", quota=Quota(gpus=8)),
    Queue(name="a", quota=Quota(gpus=4), limit=Quota(gpus=6), parent="org"),
    Queue(name="b", quota=Quota(gpus=4), limit=Quota(gpus=8), parent="org"),
]


def test_idle_quota_is_lent_up_to_the_limit() -> None:
    pending = [job(f"a{i}", gpus=2, queue="a", age=9 - i) for i in range(4)]
    snapshot = world(node("n1", gpus=16, cpus=16), queues=LENDING, pending=pending)

    assert starts(snapshot) == {"a0": False, "a1": False, "a2": True}
    assert reasons(snapshot) == {"a3": Reason.QUOTA}
    assert explain(snapshot, "a3").words == (
        "the limit of queue a is exhausted: 6 GPUs of 6 GPUs in use, 2 GPUs requested"
    )


def test_the_limit_of_a_parent_holds_for_all_below_it() -> None:
    first = world(
        node("n1", gpus=16, cpus=16),
        queues=LENDING,
        pending=[job("a1", gpus=6, queue="a"), job("b1", gpus=2, queue="b")],
    )

    snapshot = with_pending(started(first), job("b2", gpus=4, queue="b", preemptible=False))

    assert reasons(snapshot) == {"b2": Reason.QUOTA}
    assert explain(snapshot, "b2").words == (
        "the quota of queue b is exhausted: 2 GPUs of 4 GPUs in use, 4 GPUs requested; "
        "a job that is not preemptible cannot borrow"
    )
    roomy = [LENDING[0], LENDING[1].model_copy(update={"quota": Quota(gpus=6)}), LENDING[2]]
    full = with_pending(
        started(first.model_copy(update={"queues": tuple(roomy)})), job("b2", gpus=1, queue="b")
    )
    assert explain(full, "b2").words == (
        "the quota of queue org (above b) is exhausted: 8 GPUs of 8 GPUs in use, 1 GPU requested"
    )


def test_jobs_within_their_quota_go_before_jobs_that_borrow() -> None:
    pending = [job("a1", gpus=6, queue="a", age=9), job("b1", gpus=4, queue="b", age=1)]

    snapshot = world(node("n1", gpus=8, cpus=16), queues=LENDING, pending=pending)

    assert starts(snapshot) == {"b1": False}


def test_a_gpu_fraction_counts_as_a_fraction() -> None:
    halves = [job(f"h{i}", gpus=1, gpu={"gpu_milli": 500}) for i in range(5)]
    queues = [Queue(name="default", quota=Quota(gpus=2))]

    snapshot = world(node("n1", gpus=4, cpus=16, shares=True), queues=queues, pending=halves)

    assert len(starts(snapshot)) == 4


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ({"a": "b", "b": "a"}, "queue a stands above itself"),
        ({"a": "lost"}, "the parent lost, which is not there"),
    ],
)
def test_queues_that_are_no_tree_are_refused(parents: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        world(queues=[Queue(name=name, parent=parent) for name, parent in parents.items()])


# ------------------------------------------------------------------------------------------------ budgets


def test_a_job_beyond_its_workspace_budget_waits_and_blocks_no_other() -> None:
    pending = [
        job("dear", gpus=4, limit=120, workspace="w1", age=3),
        job("cheap", gpus=1, limit=120, workspace="w1", age=2),
        job("other", gpus=4, limit=600, workspace="w2", age=1),
    ]
    snapshot = world(
        node("n1", gpus=8, cpus=8), pending=pending, budgets=(Budget(workspace="w1", gpu_hours=5.0),)
    )

    assert reasons(snapshot) == {"dear": Reason.BUDGET}
    assert [*starts(snapshot)] == ["cheap", "other"]
    explanation = explain(snapshot, "dear")
    assert explanation.words == (
        "the budget of its workspace does not cover it in addition to the running jobs: "
        "5 GPU-hours left, up to 8 needed"
    )
    assert explanation.would_start[0] == "a time limit of at most 1h 15m"


def test_running_jobs_use_up_the_budget_until_their_limits() -> None:
    budget = (Budget(workspace="w1", money=10.0),)
    price = Price(cpu=0.5, gpu=2.0, gpus={"H200": 4.0})
    first = world(
        node("n1", gpus=8),
        pending=[job("runs", gpus=1, limit=60, workspace="w1")],
        budgets=budget,
        price=price,
    )
    later = started(first).model_copy(update={"now": first.now + minutes(30)})

    assert [*starts(with_pending(later, job("next", gpus=1, limit=100, workspace="w1")))] == ["next"]
    assert reasons(with_pending(later, job("next", gpus=1, limit=106, workspace="w1"))) == {
        "next": Reason.BUDGET
    }


def test_an_overspent_budget_starts_no_job_and_evicts_none() -> None:
    first = started(world(node("n1", gpus=2), pending=[job("runs", gpus=1, workspace="w1")]))
    spent = first.model_copy(update={"budgets": (Budget(workspace="w1", gpu_hours=-1.0),)})

    decisions = decide(with_pending(spent, job("next", gpus=1, workspace="w1", priority=9)))

    assert decisions == (Wait(job="next", reason=Reason.BUDGET),)
