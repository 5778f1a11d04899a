"""Every replay is deterministic, and no work is lost or done twice unnoticed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.records.scheduling.simulation import NO_TIME, Assumptions, Outage, SimulatedCluster
from falaj.records.scheduling.snapshot import Decision, Queue, Quota, Snapshot
from falaj.scheduling import decide
from falaj.scheduling.simulator import simulate
from simulator_fixtures import RecordingScheduler, at, machine, many, minutes, one_by_one, world_of

SEEDS = st.integers(0, 10_000)
ASSUME = Assumptions(grace=minutes(2), checkpoint_every=minutes(3), half_life=minutes(60))
QUEUES = (
    Queue(name="risk", quota=Quota(gpus=4), limit=Quota(gpus=6), weight=2),
    Queue(name="research", quota=Quota(gpus=4), limit=Quota(gpus=6)),
)


def crowded(*, outages: Iterable[Outage] = ()) -> SimulatedCluster:
    nodes = machine("n1", gpus=2), machine("n2", gpus=4)
    return world_of(*nodes, queues=QUEUES, assume=ASSUME).model_copy(update={"outages": tuple(outages)})


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_equal_input_in_any_order_gives_equal_results(seed: int) -> None:
    jobs = many(seed, 40, queues=("risk", "research"))
    mixed = random.Random(seed).sample(jobs, len(jobs))

    assert simulate(jobs, crowded()) == simulate(mixed, crowded())


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_all_submitted_work_completes(seed: int) -> None:
    jobs = many(seed, 40, queues=("risk", "research"))
    outage = Outage(node="n2", lost_at=at(10), back_at=at(15))

    found = simulate(jobs, crowded(outages=[outage]))

    lasts = {job.request.job: job for job in jobs}
    assert found.total.ended == len(jobs)
    for outcome in found.jobs:
        job = lasts[outcome.job]
        graces = outcome.evicted * ASSUME.grace
        if outcome.end == "done":
            assert job.duration <= outcome.ran - outcome.lost <= job.duration + graces
        else:
            assert job.request.time_limit is not None
            assert outcome.ran >= job.request.time_limit < job.duration
        assert outcome.ended_at is not None
        assert outcome.ended_at - outcome.submitted_at >= outcome.ran
    assert abs(sum(job.gpu_hours for job in found.jobs) - found.total.gpu_hours) < 1e-9


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_a_gang_by_gang_evicting_scheduler_conserves_work_too(seed: int) -> None:
    jobs = many(seed, 25)

    found = simulate(jobs, world_of(machine(gpus=2), assume=ASSUME), scheduler=one_by_one)

    lost = sum((job.lost for job in found.jobs), NO_TIME)
    done = [job for job in found.jobs if job.end == "done"]
    durations = {job.request.job: job.duration for job in jobs}
    assert found.total.lost == lost
    assert all(
        job.ran == durations[job.job] + job.lost + job.evicted * ASSUME.grace or job.displaced for job in done
    )


@settings(max_examples=10, deadline=None)
@given(SEEDS)
def test_running_jobs_never_exceed_capacity(seed: int) -> None:
    watched = RecordingScheduler(decide)

    simulate(many(seed, 40, queues=("risk", "research")), crowded(), scheduler=watched)

    for snapshot in watched.seen:
        gpus = Counter(gpu for each in snapshot.running for place in each.placements for gpu in place.gpus)
        assert not gpus or max(gpus.values()) == 1
        assert (
            len({each.request.job for each in snapshot.running} & {each.job for each in snapshot.pending})
            == 0
        )


def test_a_scheduler_that_is_called_less_often_only_delays() -> None:
    jobs = many(5, 40, queues=("risk", "research"))
    slow = crowded().model_copy(
        update={"assume": ASSUME.model_copy(update={"decide_every": timedelta(minutes=5)})}
    )

    often, seldom = simulate(jobs, crowded()), simulate(jobs, slow)

    assert often.total.ended == seldom.total.ended == len(jobs)
    assert seldom.decisions < often.decisions


def never(snapshot: Snapshot) -> list[Decision]:
    return []


def test_a_scheduler_that_does_nothing_leaves_all_waiting() -> None:
    found = simulate(many(1, 10), world_of(), scheduler=never)

    assert (found.total.never_started, found.total.gpu_hours) == (10, 0)
