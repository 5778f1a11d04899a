"""The baseline schedulers implement the policies that their names say."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_schedulers import BatchRound, easy_backfill, first_come_first_served
from falaj.records.scheduling.simulation import PastJob
from falaj.records.scheduling.snapshot import Decision, Reason, Snapshot
from falaj.scheduling.simulator import Scheduler, simulate
from simulator_fixtures import RecordingScheduler, machine, many, minutes, past, world_of


def waits(jobs: list[PastJob], scheduler: Scheduler) -> dict[str, float | None]:
    """Return the waits in minutes, on four GPUs."""
    found = simulate(jobs, world_of(machine(gpus=4)), scheduler=scheduler)
    return {each.job: None if each.wait is None else each.wait.total_seconds() / 60 for each in found.jobs}


WORK = [
    past("runs", 0, 60, gpus=3, limit=60),
    past("head", 1, 60, gpus=4, limit=60),
    past("short", 2, 30, gpus=1, limit=50),
    past("long", 3, 90, gpus=1, limit=100),
]


def test_no_job_overtakes_under_fcfs() -> None:
    assert waits(WORK, first_come_first_served) == {"runs": 0, "head": 59, "short": 118, "long": 117}


def test_a_job_that_ends_before_the_head_starts_may_overtake_it_and_a_longer_one_may_not() -> None:
    assert waits(WORK, easy_backfill) == {"runs": 0, "head": 59, "short": 0, "long": 117}


def test_a_long_job_may_start_beside_the_reservation_of_the_head() -> None:
    jobs = [*WORK[:1], past("head", 1, 60, gpus=3, limit=60), past("long", 2, 600, gpus=1, limit=600)]

    assert waits(jobs, easy_backfill)["long"] == 0
    assert waits(jobs, easy_backfill)["head"] == 59


def test_no_job_overtakes_without_known_end_times() -> None:
    jobs = [past("runs", 0, 60, gpus=3), past("head", 1, 60, gpus=4), past("short", 2, 1, gpus=1, limit=1)]

    assert waits(jobs, easy_backfill)["short"] == 118


@pytest.mark.parametrize("scheduler", [first_come_first_served, easy_backfill])
def test_a_job_that_can_never_start_blocks_no_other(scheduler: Scheduler) -> None:
    found = simulate([past("huge", 0, 1, gpus=9), past("fits", 1, 1)], world_of(), scheduler=scheduler)

    assert {each.job: each.reason for each in found.jobs} == {"huge": Reason.TOO_LARGE, "fits": None}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([first_come_first_served, easy_backfill]))
def test_no_resource_is_allocated_twice_and_all_jobs_end(seed: int, scheduler: Scheduler) -> None:
    watched = RecordingScheduler(scheduler)

    found = simulate(
        many(seed, 40), world_of(machine("n1", gpus=2), machine("n2", gpus=3)), scheduler=watched
    )

    assert found.total.ended == 40
    for snapshot in watched.seen:
        gpus = [gpu for each in snapshot.running for place in each.placements for gpu in place.gpus]
        assert len(set(gpus)) == len(gpus)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_backfill_never_delays_the_head_beyond_its_reservation(seed: int) -> None:
    """Every job with a limit ends by it, so the head starts no later than first promised."""
    jobs = [
        job.model_copy(update={"request": job.request.model_copy(update={"time_limit": minutes(20)})})
        for job in many(seed, 40)
    ]
    promises: dict[str, datetime] = {}

    def noting(snapshot: Snapshot) -> Iterable[Decision]:
        turn = BatchRound(snapshot, overtaking=True)
        decisions = list(turn.decisions())
        if turn.head is not None and turn.at is not None:
            promises.setdefault(turn.head.job, turn.at)
        return decisions

    found = simulate(jobs, world_of(machine(gpus=4)), scheduler=noting)

    started = {each.job: each.started_at for each in found.jobs if each.started_at}
    assert all(started[job] <= at for job, at in promises.items())
