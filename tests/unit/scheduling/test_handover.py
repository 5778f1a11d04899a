"""Where Kueue decides: which jobs are handed over to it, and why the others wait."""

from __future__ import annotations

import pytest

from falaj.records.scheduling.snapshot import Budget, Queue, Quota, Reason, Request, priority_class
from falaj.scheduling import explain_handover, hand_over
from workloads import job, node, world

NODES = (node("a", cpus=8, gpus=2), node("b", cpus=8, gpus=2, jurisdiction="DE"))
HOME = "workspace_1"


def handed(
    *pending: Request, waiting: tuple[Request, ...] = (), limit: int = 2, **other: object
) -> list[str]:
    return [each.job for each in hand_over(world(*NODES, pending=pending, **other), waiting, limit=limit)]


def test_all_jobs_are_handed_over_though_the_nodes_hold_only_some() -> None:
    jobs = [job(name, gpus=2, age=age) for name, age in (("late", 1), ("early", 3), ("middle", 2))]

    assert handed(*jobs, limit=5) == ["early", "middle", "late"]


def test_of_each_queue_a_bounded_number_waits_in_kueue_in_the_order_of_priority() -> None:
    queues = [Queue(name="default"), Queue(name="risk")]
    ours = [job(f"ours-{n}", age=9 - n) for n in range(4)]
    vital = job("vital", priority=50, age=1)
    theirs = job("theirs", queue="risk", age=1)

    assert handed(*ours, vital, theirs, queues=queues) == ["vital", "ours-0", "theirs"]


def test_jobs_in_kueue_count_and_urgent_ones_do_not_wait_behind_them() -> None:
    waiting = (job("first", age=9), job("second", age=8))

    assert handed(job("third"), job("urgent", priority=1000), waiting=waiting) == ["urgent"]
    assert handed(job("slightly-above", priority=3), waiting=waiting) == []  # Kueue knows classes alone


def test_a_budget_that_is_spent_or_promised_keeps_jobs_here() -> None:
    budget = Budget(workspace=HOME, gpu_hours=3)
    jobs = [job(f"job-{n}", gpus=2, limit=60, age=9 - n, workspace=HOME) for n in range(3)]

    assert handed(*jobs, limit=9, budgets=(budget,)) == ["job-0"]
    assert handed(*jobs[1:], waiting=(jobs[0],), limit=9, budgets=(budget,)) == []
    assert handed(*jobs, limit=9, budgets=(Budget(workspace=HOME, gpu_hours=0),)) == []


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (job("it", only=["FR"]), Reason.RESIDENCY),
        (job("it", queue="gone"), Reason.NO_QUEUE),
        (job("it", gpus=3), Reason.TOO_LARGE),
        (job("it", gpus=1, queue="small"), Reason.TOO_LARGE),
    ],
)
def test_what_the_platform_refuses_is_not_handed_over_and_says_why(asked: Request, reason: Reason) -> None:
    queues = [Queue(name="default"), Queue(name="small", quota=Quota(gpus=0))]
    snapshot = world(*NODES, pending=[asked], queues=queues)

    assert hand_over(snapshot, (), limit=5) == []
    explained = explain_handover(snapshot, (), "it", said=None, limit=5)
    assert (explained.state, explained.reason) == ("waiting", reason)
    assert explained.words.startswith("it is not handed over to Kueue: ")


def test_the_explanation_has_what_kueue_says_or_why_the_job_is_still_here() -> None:
    first, second, third = (job(name, age=age) for name, age in (("first", 9), ("second", 8), ("third", 7)))
    snapshot = world(*NODES, pending=[second, third])

    found = {
        name: explain_handover(snapshot, [first], name, said="Kueue waits for quota: 1 more needed", limit=2)
        for name in ("first", "second", "third")
    }

    assert found["first"].words == "Kueue waits for quota: 1 more needed"
    assert (found["first"].reason, found["first"].position, found["first"].of) == (Reason.KUEUE, 1, 3)
    assert found["second"].words == "it is handed over to Kueue now"
    assert found["third"].words == (
        "2 jobs of queue default with its priority or a higher one wait in Kueue, the most at once "
        "(kubernetes.waiting_limit = 2); it is handed over when one of them starts"
    )


def test_the_explanation_of_a_spent_budget_is_the_usual_one() -> None:
    asked = job("it", gpus=2, limit=60, workspace=HOME)
    snapshot = world(*NODES, pending=[asked], budgets=(Budget(workspace=HOME, gpu_hours=1),))

    assert explain_handover(snapshot, (), "it", said=None, limit=2).words == (
        "it is not handed over to Kueue: the budget of its workspace does not cover it in addition to the running "
        "jobs: 1 GPU-hours left, up to 2 needed"
    )


@pytest.mark.parametrize(
    ("priority", "name"),
    [
        (-5000, "low"),
        (-1000, "low"),
        (-1, "low"),
        (0, "normal"),
        (999, "normal"),
        (1000, "high"),
        (10**6, "urgent"),
    ],
)
def test_a_priority_between_two_classes_is_of_the_lower_one(priority: int, name: str) -> None:
    assert priority_class(priority) == name
