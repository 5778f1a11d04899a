"""The quota of a team stays available to it, whatever the team has borrowed beyond it."""

from __future__ import annotations

from collections import Counter

import pytest

from falaj.records.scheduling.snapshot import Evict, Queue, Quota, Reason, Request, Snapshot, Start, Wait
from falaj.scheduling import decide, explain
from falaj.scheduling.capacity.resources import requested_amount
from workloads import (
    apply_decisions,
    competing_teams,
    for_any,
    job,
    node,
    started,
    stop_leaving_jobs,
    with_pending,
    world,
    worlds,
)

TEAM = Queue(name="risk", quota=Quota(cpus=4), limit=Quota(cpus=8))
OTHERS = Queue(name="fraud", quota=Quota(cpus=4), limit=Quota(cpus=8))


def borrowed(*pending: Request, cpus: int = 16, team: Queue = TEAM, priority: int = 0) -> Snapshot:
    """Return a cluster on which risk runs one job of 6 CPUs, more than its quota, and nothing else."""
    large = job("large", cpus=6, queue="risk", priority=priority, age=9)
    first = world(node("n1", cpus=cpus), queues=[team, OTHERS], pending=[large])
    return with_pending(started(first), *pending)


def starts(snapshot: Snapshot) -> dict[str, bool]:
    return {each.job: each.borrows for each in decide(snapshot) if isinstance(each, Start)}


def evictions(snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    return {each.job: (each.by, each.why) for each in decide(snapshot) if isinstance(each, Evict)}


@pytest.mark.parametrize("preemptible", [True, False])
def test_borrowed_resources_do_not_use_up_the_quota(preemptible: bool) -> None:
    snapshot = borrowed(job("own", cpus=2, queue="risk", preemptible=preemptible))

    assert starts(snapshot) == {"own": False}


def test_a_team_borrows_beyond_its_quota() -> None:
    roomy = TEAM.model_copy(update={"limit": Quota(cpus=16)})
    snapshot = borrowed(
        job("own", cpus=3, queue="risk", age=2), job("more", cpus=2, queue="risk", age=1), team=roomy
    )

    assert starts(snapshot) == {"own": False, "more": True}


def test_own_quota_goes_before_borrowing_by_others() -> None:
    snapshot = borrowed(
        job("theirs", cpus=6, queue="fraud", age=9),
        job("own", cpus=2, queue="risk", preemptible=False),
        cpus=12,
    )

    assert starts(snapshot) == {"own": False}


def test_borrowers_are_evicted_for_jobs_that_may_not_borrow() -> None:
    """The limit is 8, of which 6 are borrowed."""
    snapshot = borrowed(job("own", cpus=4, queue="risk", preemptible=False))

    assert evictions(snapshot) == {"large": ("own", "reclaim")}
    assert starts(stop_leaving_jobs(apply_decisions(snapshot, decide(snapshot)))) == {"own": False}


def test_no_job_is_evicted_for_an_equal_that_could_borrow() -> None:
    assert decide(borrowed(job("own", cpus=4, queue="risk"))) == (Wait(job="own", reason=Reason.QUOTA),)


def test_a_higher_priority_job_is_not_evicted_for_a_lower_one_of_its_team() -> None:
    snapshot = borrowed(job("own", cpus=4, queue="risk", preemptible=False), priority=1)

    assert decide(snapshot) == (Wait(job="own", reason=Reason.QUOTA),)
    assert explain(snapshot, "own").words == (
        "the limit of queue risk is exhausted: 6 CPUs of 8 CPUs in use, 4 CPUs requested"
    )


def test_a_team_above_its_quota_reclaims_nothing_from_others() -> None:
    """Its own borrowing job is evicted, although the one of fraud is younger."""
    full = started(borrowed(job("theirs", cpus=6, queue="fraud"), cpus=12))
    stays = job("own", cpus=2, queue="risk", preemptible=False)

    assert [each.borrows for each in full.running] == [True, True]
    assert evictions(with_pending(full, stays)) == {"large": ("own", "reclaim")}
    assert evictions(with_pending(full, stays.model_copy(update={"preemptible": True}))) == {}


def test_a_team_reclaims_from_others_after_its_own_borrowers_left() -> None:
    """Both are needed: risk has 2 borrowed CPUs on the node, and is entitled to 4."""
    first = started(
        world(
            node("n1", cpus=8),
            queues=[TEAM, OTHERS],
            pending=[
                job("keeps", cpus=3, queue="risk", age=9),
                job("risky", cpus=2, queue="risk", age=8),
            ],
        )
    )
    left = tuple(each for each in first.running if each.request.job != "keeps")
    full = started(
        with_pending(first.model_copy(update={"running": left}), job("theirs", cpus=6, queue="fraud"))
    )

    snapshot = with_pending(full, job("own", cpus=4, queue="risk", preemptible=False))

    assert {each.request.job: each.borrows for each in full.running} == {"risky": True, "theirs": True}
    assert evictions(snapshot).keys() == {"risky", "theirs"}
    assert starts(stop_leaving_jobs(apply_decisions(snapshot, decide(snapshot))))["own"] is False


def test_equal_priority_jobs_do_not_evict_each_other_within_quota() -> None:
    first = started(
        world(
            node("n1", cpus=6),
            queues=[TEAM, OTHERS],
            pending=[job("gone", cpus=4, queue="risk", age=9), job("risky", cpus=2, queue="risk", age=8)],
        )
    )
    left = tuple(each for each in first.running if each.request.job != "gone")
    full = started(
        with_pending(first.model_copy(update={"running": left}), job("theirs", cpus=4, queue="fraud"))
    )

    assert [each.borrows for each in full.running] == [True, False]
    assert evictions(with_pending(full, job("own", cpus=2, queue="risk", preemptible=False))) == {}


def test_explanation_of_an_exhausted_quota_excludes_borrowed_resources() -> None:
    roomy = TEAM.model_copy(update={"limit": Quota(cpus=16)})
    busy = started(borrowed(job("first", cpus=3, queue="risk"), team=roomy))

    explanation = explain(with_pending(busy, job("own", cpus=2, queue="risk", preemptible=False)), "own")

    assert explanation.words == (
        "the quota of queue risk is exhausted: 3 CPUs of 4 CPUs in use, 2 CPUs requested; "
        "a job that is not preemptible cannot borrow"
    )


# ---------------------------------------------------------------------------------------------- properties


@pytest.mark.slow
@for_any(worlds() | competing_teams())
def test_jobs_that_may_not_borrow_wait_for_quota_only_if_a_bound_is_used_up(snapshot: Snapshot) -> None:
    """With that job alone in the queue, either the quota is used up by jobs that do not borrow, or the limit by all."""
    for request in snapshot.pending:
        alone = snapshot.model_copy(update={"pending": (request,)})
        answer = decide(alone)[-1]
        if isinstance(answer, Wait) and answer.reason is Reason.QUOTA:
            assert any(is_full(snapshot, queue, request) for queue in path(snapshot, request.queue))


def is_full(snapshot: Snapshot, queue: Queue, request: Request) -> bool:
    held: Counter[tuple[str, str]] = Counter()
    for each in snapshot.running:
        if queue in path(snapshot, each.request.queue):
            for what, size in requested_amount(each.request)._asdict().items():
                held[what, "all"] += size
                held[what, "own"] += 0 if each.borrows else size
    quota, limit = bounds(queue.quota), bounds(queue.limit or queue.quota)
    inner = any(each.parent == queue.name for each in snapshot.queues)
    return (inner and queue.name == request.queue) or any(
        held[what, "all"] + size > limit.get(what, 2**99)
        or (not request.preemptible and held[what, "own"] + size > quota.get(what, 2**99))
        for what, size in requested_amount(request)._asdict().items()
    )


def bounds(quota: Quota) -> dict[str, int]:
    found = {
        "cpus": quota.cpus,
        "gpus": quota.gpus and quota.gpus * 1000,
        "memory": quota.memory_bytes,
    }
    return {what: size for what, size in found.items() if size is not None}


def path(snapshot: Snapshot, name: str | None) -> list[Queue]:
    queues = {queue.name: queue for queue in snapshot.queues}
    found = []
    while name is not None:
        found.append(queues[name])
        name = queues[name].parent
    return found
