"""The incremental scheduler decides as from a complete snapshot."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.records.scheduling.simulation import Assumptions, Outage
from falaj.records.scheduling.snapshot import Queue, Quota, Reason
from falaj.scheduling import decide
from falaj.scheduling.simulator import simulate
from simulator_fixtures import at, machine, many, minutes, past, world_of

QUEUES = (
    Queue(name="risk", quota=Quota(gpus=4), limit=Quota(gpus=6), weight=2),
    Queue(name="research", quota=Quota(gpus=2), limit=Quota(gpus=6)),
)
ASSUME = Assumptions(grace=minutes(2), checkpoint_every=minutes(3), half_life=minutes(60))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_incremental_scheduling_equals_scheduling_from_snapshots(seed: int) -> None:
    jobs = many(seed, 60, queues=("risk", "research", "nowhere"))
    outage = Outage(node="n2", lost_at=at(10), back_at=at(15))
    world = world_of(machine("n1", gpus=2), machine("n2", gpus=4), queues=QUEUES, assume=ASSUME)
    world = world.model_copy(update={"outages": (outage,)})

    remembered, shown = simulate(jobs, world), simulate(jobs, world, scheduler=decide)

    assert remembered.jobs == shown.jobs
    assert remembered.fairness == shown.fairness
    assert remembered.decisions <= shown.decisions


def test_jobs_that_can_never_start_are_reported_and_left_out_of_the_backlog() -> None:
    jobs = [past(f"huge-{i}", i, 1, gpus=9) for i in range(3)] + [past("lost", 0, 1, queue="nowhere")]

    found = simulate([*jobs, past("fits", 0, 60)], world_of())

    reasons = {job.job: job.reason for job in found.jobs}
    assert [reasons[f"huge-{i}"] for i in range(3)] == [Reason.TOO_LARGE] * 3
    assert reasons["lost"] == Reason.NO_QUEUE
    assert found.fairness.queues == ()
