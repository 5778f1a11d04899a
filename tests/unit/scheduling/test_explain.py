"""Explanations of waiting jobs."""

from __future__ import annotations

import pytest

from falaj.errors import NotFound
from falaj.records.scheduling.snapshot import Evict, Queue, Quota, Reason, Snapshot, Wait
from falaj.scheduling import decide, explain
from workloads import NOON, for_any, job, minutes, node, started, with_pending, world, worlds

BUSY = started(world(node("n1", cpus=8, gpus=2), pending=[job("runs", cpus=4, gpus=1, age=9, limit=30)]))
STAYS = job("runs", cpus=4, gpus=1, age=9, limit=30, preemptible=False)


def test_explanation_of_a_running_job() -> None:
    explanation = explain(BUSY, "runs")

    assert (explanation.state, explanation.position, explanation.of) == ("running", None, 0)
    assert explanation.words == "runs on n1 since 2026-03-01 12:00:00 UTC"


def test_explanation_of_a_job_that_is_about_to_start() -> None:
    explanation = explain(with_pending(BUSY, job("next")), "next")

    assert (explanation.state, explanation.position, explanation.of) == ("starting", 1, 1)
    assert explanation.expected_start == NOON
    assert explanation.words == "starts now on n1"


def test_explanation_of_a_head_that_waits_for_busy_nodes() -> None:
    explanation = explain(with_pending(BUSY, job("head", cpus=6, gpus=2, age=5), job("small")), "head")

    assert explanation.reason is Reason.CAPACITY
    assert explanation.words == (
        "needs 6 CPUs, 2 GPUs; the closest node, n1, has 4 CPUs, 1 GPU, 64 GiB free; it gets the reservation"
    )
    assert (explanation.position, explanation.of) == (1, 2)
    assert explanation.would_start == ("one more node like n1",)
    assert explanation.expected_start == NOON + minutes(30)


def test_explanation_names_how_many_replicas_of_a_gang_fit() -> None:
    explanation = explain(with_pending(BUSY, job("gang", cpus=2, replicas=4)), "gang")

    assert (
        explanation.words == "needs 4 replicas of 2 CPUs each; 2 of 4 replicas fit; it gets the reservation"
    )
    assert explanation.would_start == (
        "at most 2 replicas",
        "at most 1 CPU per replica",
        "one more node like n1",
    )


def test_explanation_names_the_head_and_what_would_let_a_job_overtake_it() -> None:
    busy = [each.model_copy(update={"request": STAYS}) for each in BUSY.running]
    kept = BUSY.model_copy(update={"running": tuple(busy)})
    snapshot = with_pending(kept, job("head", cpus=8, age=5, priority=3), job("small", cpus=2))

    explanation = explain(snapshot, "small")

    assert explanation.reason is Reason.RESERVED
    assert explanation.words == (
        "needs 2 CPUs; waits behind head (priority 3), for which n1 is reserved from 2026-03-01 12:30:00 UTC"
    )
    assert explanation.would_start == (
        "a time limit of at most 30m",
        "a priority above 3",
        "one more node like n1",
    )
    assert explanation.expected_start is None  # the head itself has no limit


def test_explanation_names_the_figures_of_an_exhausted_quota() -> None:
    queues = [Queue(name="default", quota=Quota(gpus=4))]
    busy = started(
        world(node("n1", cpus=64, gpus=8), queues=queues, pending=[job("runs", gpus=3, age=9, limit=45)])
    )

    explanation = explain(with_pending(busy, job("next", gpus=2)), "next")

    assert explanation.reason is Reason.QUOTA
    assert explanation.words == (
        "the quota of queue default is exhausted: 3 GPUs of 4 GPUs in use, 2 GPUs requested"
    )
    assert explanation.would_start == ("at most 1 GPU per replica", "a quota of 5 GPUs for queue default")
    assert explanation.expected_start == NOON + minutes(45)


def test_explanation_distinguishes_quota_reserved_for_others() -> None:
    queues = [Queue(name="default", quota=Quota(cpus=8))]
    busy = started(world(node("n1", cpus=64), queues=queues, pending=[job("runs", cpus=4, age=9)]))

    explanation = explain(with_pending(busy, job("first", cpus=6, age=5), job("next", cpus=4)), "next")

    assert explanation.words == (
        "the quota of queue default is exhausted: 4 CPUs of 8 CPUs in use, 2 CPUs reserved for jobs ahead, "
        "4 CPUs requested"
    )


def test_explanation_names_the_zones_that_may_hold_the_data() -> None:
    snapshot = world(node("f1", jurisdiction="DE"), pending=[job("ours", only=["AE", "SA"])])

    explanation = explain(snapshot, "ours")

    assert explanation.reason is Reason.RESIDENCY
    assert explanation.words == "its data may be stored only in AE, SA; the nodes are in DE"
    assert explanation.would_start == ("one more node like f1 in AE", "one more node like f1 in SA")
    assert explanation.expected_start is None


def test_explanation_names_permitted_nodes_that_are_too_small() -> None:
    nodes = node("a1", cpus=2), node("f1", cpus=32, jurisdiction="DE")

    explanation = explain(world(*nodes, pending=[job("ours", cpus=4, only=["AE"])]), "ours")

    assert explanation.words == (
        "its data may be stored only in AE, where the nodes are too small even when idle: "
        "the closest node, a1, has 2 CPUs, 0 GPUs, 64 GiB free"
    )
    assert explanation.would_start == ("at most 2 CPUs per replica", "one more node like f1 in AE")


def test_explanation_names_a_capacity_that_is_smaller_than_the_job() -> None:
    explanation = explain(world(node("n1", gpus=8), pending=[job("huge", gpus=16)]), "huge")

    assert explanation.reason is Reason.TOO_LARGE
    assert explanation.words == (
        "needs 1 CPU, 16 GPUs, more than the cluster has: the closest node, n1, has 8 CPUs, 8 GPUs, 64 GiB free"
    )
    assert explanation.would_start == ("at most 8 GPUs per replica",)


def test_explanation_names_a_quota_that_is_smaller_than_the_job() -> None:
    queues = [Queue(name="default", quota=Quota(gpus=4))]

    explanation = explain(world(node("n1", gpus=8), queues=queues, pending=[job("huge", gpus=8)]), "huge")

    assert (
        explanation.words
        == "needs more than its queue may ever hold: 8 GPUs requested, queue default may hold 4 GPUs"
    )
    assert explanation.would_start == ("at most 4 GPUs per replica", "a quota of 8 GPUs for queue default")


def test_explanation_names_the_known_queues_for_an_unknown_one() -> None:
    explanation = explain(world(node("n1"), pending=[job("lost", queue="riks")]), "lost")

    assert explanation.words == "queue riks does not exist; the queues are: default"
    assert explanation.would_start == ("queue default",)


def test_explanation_for_a_cluster_without_nodes() -> None:
    explanation = explain(world(pending=[job("early", cpus=2)]), "early")

    assert explanation.words == "needs 2 CPUs, more than the cluster has: there are no nodes"
    assert explanation.would_start == ()


def test_an_unknown_job_is_not_found() -> None:
    with pytest.raises(NotFound):
        explain(BUSY, "nobody")


@for_any(worlds(most=6))
def test_explanation_equals_the_decision(snapshot: Snapshot) -> None:
    answers = [decision for decision in decide(snapshot) if not isinstance(decision, Evict)]
    for position, decision in enumerate(answers, start=1):
        explanation = explain(snapshot, decision.job)

        assert explanation.position == position
        assert explanation.reason == (decision.reason if isinstance(decision, Wait) else None)
        assert (explanation.state == "starting") is (explanation.reason is None)
