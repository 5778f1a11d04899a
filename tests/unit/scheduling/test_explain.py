"""What people are told about a job that waits."""

from __future__ import annotations

import pytest

from falaj.errors import NotFound
from falaj.records.scheduling.snapshot import Evict, Queue, Quota, Reason, Snapshot, Wait
from falaj.scheduling import decide, explain
from workloads import NOON, for_any, job, minutes, node, started, with_pending, world, worlds

BUSY = started(world(node("n1", cpus=8, gpus=2), pending=[job("runs", cpus=4, gpus=1, age=9, limit=30)]))
STAYS = job("runs", cpus=4, gpus=1, age=9, limit=30, preemptible=False)


def test_a_running_job() -> None:
    told = explain(BUSY, "runs")

    assert (told.state, told.position, told.of) == ("running", None, 0)
    assert told.words == "runs on n1 since 2026-03-01 12:00:00 UTC"


def test_a_job_that_is_about_to_start() -> None:
    told = explain(with_pending(BUSY, job("next")), "next")

    assert (told.state, told.position, told.of, told.expected_start) == ("starting", 1, 1, NOON)
    assert told.words == "starts now on n1"


def test_the_head_waits_for_busy_nodes() -> None:
    told = explain(with_pending(BUSY, job("head", cpus=6, gpus=2, age=5), job("small")), "head")

    assert told.reason is Reason.CAPACITY
    assert told.words == (
        "needs 6 CPUs, 2 GPUs; the closest node, n1, has 4 CPUs, 1 GPU, 64 GiB free; it gets the reservation"
    )
    assert (told.position, told.of) == (1, 2)
    assert told.would_start == ("one more node like n1",)
    assert told.expected_start == NOON + minutes(30)


def test_a_gang_is_told_how_many_of_it_fit() -> None:
    told = explain(with_pending(BUSY, job("gang", cpus=2, replicas=4)), "gang")

    assert told.words == "needs 4 replicas of 2 CPUs each; 2 of 4 replicas fit; it gets the reservation"
    assert told.would_start == ("at most 2 replicas", "at most 1 CPU per replica", "one more node like n1")


def test_a_job_behind_the_head_is_told_who_and_what_would_let_it_pass() -> None:
    busy = [each.model_copy(update={"request": STAYS}) for each in BUSY.running]
    kept = BUSY.model_copy(update={"running": tuple(busy)})
    snapshot = with_pending(kept, job("head", cpus=8, age=5, priority=3), job("small", cpus=2))

    told = explain(snapshot, "small")

    assert told.reason is Reason.RESERVED
    assert told.words == (
        "needs 2 CPUs; waits behind head (priority 3), for which n1 is reserved from 2026-03-01 12:30:00 UTC"
    )
    assert told.would_start == (
        "a time limit of at most 30m",
        "a priority above 3",
        "one more node like n1",
    )
    assert told.expected_start is None  # the head itself has no limit


def test_a_used_up_quota_is_told_in_figures() -> None:
    queues = [Queue(name="default", quota=Quota(gpus=4))]
    busy = started(
        world(node("n1", cpus=64, gpus=8), queues=queues, pending=[job("runs", gpus=3, age=9, limit=45)])
    )

    told = explain(with_pending(busy, job("next", gpus=2)), "next")

    assert told.reason is Reason.QUOTA
    assert told.words == (
        "the quota of queue default is exhausted: 3 GPUs of 4 GPUs in use, 2 GPUs requested"
    )
    assert told.would_start == ("at most 1 GPU per replica", "a quota of 5 GPUs for queue default")
    assert told.expected_start == NOON + minutes(45)


def test_quota_that_is_kept_for_others_is_told_apart() -> None:
    queues = [Queue(name="default", quota=Quota(cpus=8))]
    busy = started(world(node("n1", cpus=64), queues=queues, pending=[job("runs", cpus=4, age=9)]))

    told = explain(with_pending(busy, job("first", cpus=6, age=5), job("next", cpus=4)), "next")

    assert told.words == (
        "the quota of queue default is exhausted: 4 CPUs of 8 CPUs in use, 2 CPUs reserved for jobs ahead, "
        "4 CPUs requested"
    )


def test_data_that_may_lie_on_no_node_is_told_where_it_may_lie() -> None:
    snapshot = world(node("f1", jurisdiction="DE"), pending=[job("ours", only=["AE", "SA"])])

    told = explain(snapshot, "ours")

    assert told.reason is Reason.RESIDENCY
    assert told.words == "its data may be stored only in AE, SA; the nodes are in DE"
    assert told.would_start == ("one more node like f1 in AE", "one more node like f1 in SA")
    assert told.expected_start is None


def test_permitted_nodes_that_are_too_small_are_told_so() -> None:
    nodes = node("a1", cpus=2), node("f1", cpus=32, jurisdiction="DE")

    told = explain(world(*nodes, pending=[job("ours", cpus=4, only=["AE"])]), "ours")

    assert told.words == (
        "its data may be stored only in AE, where the nodes are too small even when idle: "
        "the closest node, a1, has 2 CPUs, 0 GPUs, 64 GiB free"
    )
    assert told.would_start == ("at most 2 CPUs per replica", "one more node like f1 in AE")


def test_a_job_larger_than_the_cluster_is_told_what_there_is() -> None:
    told = explain(world(node("n1", gpus=8), pending=[job("huge", gpus=16)]), "huge")

    assert told.reason is Reason.TOO_LARGE
    assert told.words == (
        "needs 1 CPU, 16 GPUs, more than the cluster has: the closest node, n1, has 8 CPUs, 8 GPUs, 64 GiB free"
    )
    assert told.would_start == ("at most 8 GPUs per replica",)


def test_a_job_larger_than_its_quota_is_told_the_quota() -> None:
    queues = [Queue(name="default", quota=Quota(gpus=4))]

    told = explain(world(node("n1", gpus=8), queues=queues, pending=[job("huge", gpus=8)]), "huge")

    assert (
        told.words
        == "needs more than its queue may ever hold: 8 GPUs requested, queue default may hold 4 GPUs"
    )
    assert told.would_start == ("at most 4 GPUs per replica", "a quota of 8 GPUs for queue default")


def test_an_unknown_queue_is_told_the_queues_there_are() -> None:
    told = explain(world(node("n1"), pending=[job("lost", queue="riks")]), "lost")

    assert told.words == "queue riks does not exist; the queues are: default"
    assert told.would_start == ("queue default",)


def test_a_cluster_without_nodes() -> None:
    told = explain(world(pending=[job("early", cpus=2)]), "early")

    assert told.words == "needs 2 CPUs, more than the cluster has: there are no nodes"
    assert told.would_start == ()


def test_an_unknown_job_is_not_found() -> None:
    with pytest.raises(NotFound):
        explain(BUSY, "nobody")


@for_any(worlds(most=6))
def test_explain_says_what_was_decided(snapshot: Snapshot) -> None:
    answers = [decision for decision in decide(snapshot) if not isinstance(decision, Evict)]
    for position, decision in enumerate(answers, start=1):
        told = explain(snapshot, decision.job)

        assert told.position == position
        assert told.reason == (decision.reason if isinstance(decision, Wait) else None)
        assert (told.state == "starting") is (told.reason is None)
