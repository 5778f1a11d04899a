"""Backfill: a head never starts later because of jobs behind it, and no job waits forever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import pytest
from hypothesis import strategies as st

from falaj.records.governance.residency import UNRESTRICTED
from falaj.records.scheduling.snapshot import Decision, Evict, Queue, Quota, Reason, Snapshot, Start, Wait
from falaj.scheduling import decide, expected_start, in_order
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.free_capacity import FreeCapacity
from falaj.scheduling.capacity.resources import END_OF_TIME
from falaj.scheduling.decision.scheduling_round import SchedulingRound
from workloads import (
    NOON,
    apply_decisions,
    competing_teams,
    for_any,
    job,
    minutes,
    node,
    simulate_starts,
    started,
    with_pending,
    world,
    worlds,
)

LIMITED = st.integers(2, 60)
NO_QUOTA = st.just(Quota())


def starts(snapshot: Snapshot) -> list[str]:
    return [decision.job for decision in decide(snapshot) if isinstance(decision, Start)]


def reasons(snapshot: Snapshot) -> dict[str, Reason]:
    return {decision.job: decision.reason for decision in decide(snapshot) if isinstance(decision, Wait)}


def to_their_limits(snapshot: Snapshot) -> dict[str, timedelta]:
    requests = [*snapshot.pending, *(running.request for running in snapshot.running)]
    return {request.job: request.time_limit or minutes(10_000) for request in requests}


# ------------------------------------------------------------------------------------------------ examples


def test_a_higher_priority_goes_first_then_the_earlier_submission() -> None:
    requests = [job("young", age=1), job("old", age=5), job("urgent", priority=1)]
    snapshot = world(node("n1"), pending=requests)

    assert [request.job for request in in_order(requests)] == ["urgent", "old", "young"]
    assert [decision.job for decision in decide(snapshot)] == ["urgent", "old", "young"]


def test_a_small_job_does_not_take_the_reservation_of_the_head() -> None:
    busy = started(world(node("n1", cpus=8), pending=[job("runs", cpus=4, age=9)]))

    snapshot = with_pending(busy, job("head", cpus=8, age=5), job("small", cpus=4, age=1))

    assert reasons(snapshot) == {"head": Reason.CAPACITY, "small": Reason.RESERVED}


def test_a_small_job_starts_beside_the_reservation_of_the_head() -> None:
    busy = started(world(node("n1", cpus=8), pending=[job("runs", cpus=4, age=9)]))

    snapshot = with_pending(busy, job("head", cpus=6, age=5), job("small", cpus=2, age=1))

    assert starts(snapshot) == ["small"]


def test_a_short_job_uses_the_reservation_of_the_head_if_it_ends_in_time() -> None:
    busy = started(world(node("n1", cpus=8), pending=[job("runs", cpus=4, age=9, limit=30)]))
    head = job("head", cpus=8, age=5)

    assert starts(with_pending(busy, head, job("short", cpus=4, limit=30))) == ["short"]
    assert starts(with_pending(busy, head, job("long", cpus=4, limit=31))) == []


def test_a_short_job_does_not_overtake_a_head_with_unknown_start() -> None:
    busy = started(world(node("n1", cpus=8), pending=[job("runs", cpus=4, age=9)]))

    assert starts(with_pending(busy, job("head", cpus=8, age=5), job("short", cpus=4, limit=1))) == []


def test_a_full_quota_blocks_its_own_queue_only() -> None:
    queues = [Queue(name="default"), Queue(name="risk", quota=Quota(cpus=4))]
    first = world(node("n1", cpus=16), queues=queues, pending=[job("runs", cpus=2, queue="risk")])

    snapshot = with_pending(
        started(first),
        job("large", cpus=4, queue="risk", age=5),
        job("small", cpus=2, queue="risk", age=3),
        job("other", cpus=2, age=1),
    )

    assert starts(snapshot) == ["other"]
    assert reasons(snapshot) == {"large": Reason.QUOTA, "small": Reason.QUOTA}


def test_a_job_starts_beside_the_quota_that_another_waits_for() -> None:
    queues = [Queue(name="default", quota=Quota(gpus=2))]
    first = world(node("n1", cpus=16, gpus=4), queues=queues, pending=[job("runs", gpus=2)])

    snapshot = with_pending(started(first), job("waits", gpus=1, age=5), job("without-gpus", cpus=2))

    assert starts(snapshot) == ["without-gpus"]


def test_a_job_that_can_never_start_blocks_no_other() -> None:
    snapshot = world(
        node("n1", cpus=4),
        pending=[
            job("huge", cpus=5, priority=9),
            job("abroad", only=["DE"], priority=9),
            job("lost", queue="nowhere", priority=9),
            job("fits", cpus=4),
        ],
    )

    assert starts(snapshot) == ["fits"]
    assert reasons(snapshot) == {
        "huge": Reason.TOO_LARGE,
        "abroad": Reason.RESIDENCY,
        "lost": Reason.NO_QUEUE,
    }


def test_a_gang_takes_one_node_if_one_can_hold_it() -> None:
    snapshot = world(node("n1", cpus=2), node("n2", cpus=6), pending=[job("gang", cpus=2, replicas=3)])

    (decision,) = decide(snapshot)

    assert isinstance(decision, Start)
    assert [placement.node for placement in decision.placements] == ["n2", "n2", "n2"]


def test_a_job_without_gpus_leaves_gpus_to_others() -> None:
    snapshot = world(node("a-gpus", cpus=4, gpus=4), node("b-plain", cpus=16), pending=[job("plain", cpus=4)])

    (decision,) = decide(snapshot)

    assert isinstance(decision, Start)
    assert decision.placements[0].node == "b-plain"


def test_a_lost_node_holds_nothing_and_stops_nothing() -> None:
    busy = started(world(node("n1"), pending=[job("runs", cpus=8)]))
    lost = busy.model_copy(update={"nodes": (node("n2", cpus=4),)})

    assert starts(with_pending(lost, job("next", cpus=4))) == ["next"]


def test_a_stream_of_short_jobs_does_not_take_a_reservation_with_unknown_start() -> None:
    busy = started(world(node("n1", cpus=8), pending=[job("runs", cpus=4, age=9)]))
    short = [job(f"short-{i}", cpus=1, limit=1) for i in range(4)]

    once = started(with_pending(busy, job("head", cpus=7, age=5), *short))
    later = once.model_copy(update={"now": NOON + timedelta(seconds=1)})

    assert [running.request.job for running in once.running] == ["runs", "short-0"]
    assert starts(later) == []


# ---------------------------------------------------------------------------------------------- properties


def taken(snapshot: Snapshot) -> SchedulingRound:
    """Return the round of decisions, once all jobs have been considered."""
    return SchedulingRound(snapshot).decide_all()


def promised(snapshot: Snapshot) -> dict[str, datetime | None]:
    """Return the present head, and when its reservation starts at the latest, if known."""
    head = taken(snapshot).head
    return {head.head.job: head.at} if head else {}


def over(
    snapshot: Snapshot, lasts: Mapping[str, timedelta], *, before: str, queue: str | None = None
) -> datetime:
    """Return when the jobs end that run now, or start now before `before`."""
    order = [request.job for request in in_order(snapshot.pending)]
    ahead = order[: order.index(before)]
    after = apply_decisions(snapshot, [d for d in decide(snapshot) if d.job in ahead])
    older = [r for r in after.running if queue in (None, r.request.queue)]
    return max(running.started_at + lasts[running.request.job] for running in older)


def some_run_times(snapshot: Snapshot, data: st.DataObject) -> dict[str, timedelta]:
    """Draw run times within the limits of the jobs."""
    most = {name: min(limit, minutes(100)) for name, limit in to_their_limits(snapshot).items()}
    return {name: minutes(data.draw(st.integers(2, limit // minutes(1)))) for name, limit in most.items()}


@for_any(worlds() | competing_teams())
def test_no_job_takes_the_reservation_of_the_head_within_a_round(snapshot: Snapshot) -> None:
    scheduling_round = taken(snapshot)
    if scheduling_round.head is None or any(isinstance(decision, Evict) for decision in decide(snapshot)):
        return
    head, at = scheduling_round.head.head, scheduling_round.head.at
    order = [decision.job for decision in decide(snapshot)]
    behind = order[order.index(head.job) :]

    after = apply_decisions(snapshot, decide(snapshot))

    goes_on = [
        each
        for each in after.running
        if (each.request.job in behind if at is None else each.ends_by is None or each.ends_by > at)
    ]
    cluster = Cluster(snapshot.nodes, after.running)
    capacity_now = FreeCapacity(cluster, [cluster.held_by(each) for each in goes_on])
    for index, slot in cluster.slots_of(head, scheduling_round.head.place):
        assert capacity_now.unallocated[index].covers(slot)
        capacity_now.unallocated[index] = capacity_now.unallocated[index].take(slot)


@for_any(worlds(limits=LIMITED, quota=NO_QUOTA, simple=True))
def test_jobs_behind_the_head_do_not_delay_it(snapshot: Snapshot) -> None:
    kept = taken(snapshot).head
    if kept is None:
        return
    head = kept.head
    order = in_order(snapshot.pending)
    ahead = snapshot.model_copy(update={"pending": tuple(order[: order.index(head) + 1])})

    lasts = to_their_limits(snapshot)

    assert simulate_starts(snapshot, lasts)[head.job] == simulate_starts(ahead, lasts)[head.job]


@for_any(worlds(quota=NO_QUOTA, simple=True), st.data())
def test_a_head_starts_when_expected_or_when_all_older_jobs_are_over(
    snapshot: Snapshot, data: st.DataObject
) -> None:
    lasts = some_run_times(snapshot, data)
    latest: dict[str, datetime] = {}

    def deciding(now: Snapshot) -> Sequence[Decision]:
        for name, at in promised(now).items():
            latest[name] = min(at or over(now, lasts, before=name), latest.get(name, END_OF_TIME))
        return decide(now)

    begun = simulate_starts(snapshot, lasts, decide=deciding)

    assert all(begun[name] <= at for name, at in latest.items())


@pytest.mark.slow
@for_any(worlds(simple=True), st.data())
def test_a_job_that_waits_for_quota_starts_once_all_older_jobs_of_its_queue_ended(
    snapshot: Snapshot, data: st.DataObject
) -> None:
    roomy = snapshot.model_copy(
        update={"nodes": (*snapshot.nodes, node("big", cpus=999, gpus=99, memory=999))}
    )
    pending = tuple(request.model_copy(update={"label": UNRESTRICTED}) for request in roomy.pending)
    roomy = roomy.model_copy(update={"pending": pending})
    lasts = some_run_times(roomy, data)
    latest: dict[str, datetime] = {}

    def deciding(now: Snapshot) -> Sequence[Decision]:
        for queue, request in taken(now).quota_heads.items():
            at = over(now, lasts, before=request.job, queue=queue)
            latest[request.job] = min(at, latest.get(request.job, END_OF_TIME))
        return decide(now)

    begun = simulate_starts(roomy, lasts, decide=deciding)

    assert all(begun[name] <= at for name, at in latest.items())


@pytest.mark.slow
@for_any(worlds() | competing_teams())
def test_no_job_waits_forever(snapshot: Snapshot) -> None:
    """Every job that could run alone runs eventually, however others overtake and evict."""
    idle = snapshot.model_copy(update={"running": ()})
    can_run = {
        request.job for request in snapshot.pending if starts(idle.model_copy(update={"pending": (request,)}))
    }
    lasts = {name: minutes(5) for name in to_their_limits(snapshot)}

    begun = simulate_starts(snapshot, lasts)

    assert can_run <= begun.keys()


@pytest.mark.slow
@for_any(worlds(limits=LIMITED) | competing_teams(limits=LIMITED))
def test_the_expected_start_comes_true_when_jobs_run_to_their_limits(snapshot: Snapshot) -> None:
    begun = simulate_starts(snapshot, to_their_limits(snapshot))

    for request in snapshot.pending:
        assert expected_start(snapshot, request.job) == begun.get(request.job)


def test_the_expected_start_is_unknown_behind_a_job_without_a_limit() -> None:
    busy = started(world(node("n1", cpus=8), pending=[job("runs", cpus=4)]))

    assert expected_start(with_pending(busy, job("waits", cpus=8)), "waits") is None
    assert expected_start(with_pending(busy, job("starts", cpus=4)), "starts") == NOON
