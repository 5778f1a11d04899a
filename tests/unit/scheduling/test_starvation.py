"""No job waits forever across queues, however many jobs of others keep coming."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.records.scheduling.simulation import Assumptions, JobOutcome, PastJob, SimulatedCluster
from falaj.records.scheduling.snapshot import Queue, Quota, Reason, Wait
from falaj.scheduling import decide
from falaj.scheduling.simulator import simulate
from simulator_fixtures import machine, minutes, past, team, world_of
from workloads import job, node, started, with_pending, world

LATE, STREAM = 60, 720
"""Minutes: when the single job comes, and how long the stream of others lasts."""

HALF_LIFE = minutes(60)
STREAMS = ("cards", "fraud")

Kind = tuple[int, int]
kinds = st.lists(st.tuples(st.integers(1, 4), st.integers(5, 30)), min_size=1, max_size=3)
"""GPUs and minutes of the jobs of a stream, in turn."""


def stream(queue: str, kinds: list[Kind], *, gpus: int) -> list[PastJob]:
    """Return jobs that keep that many GPUs busy, with unknown durations."""
    work = sum(min(size, gpus) * lasts for size, lasts in kinds)
    rounds = STREAM * gpus // work + 1
    return [
        past(f"{queue}-{turn:04}-{place}", STREAM * turn / rounds, lasts, gpus=min(size, gpus), queue=queue)
        for turn in range(rounds)
        for place, (size, lasts) in enumerate(kinds)
    ]


def outcome_of(name: str, jobs: list[PastJob], there: SimulatedCluster) -> JobOutcome:
    return next(each for each in simulate(jobs, there).jobs if each.job == name)


def crowd(first: list[Kind], second: list[Kind], *, gpus: int) -> list[PastJob]:
    return stream("cards", first, gpus=gpus) + stream("fraud", second, gpus=gpus)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(kinds, kinds, st.integers(1, 4), st.sampled_from(["above-all", "risk"]), st.data())
def test_a_team_without_past_usage_waits_at_most_for_the_longest_running_job(
    first: list[Kind], second: list[Kind], cards: int, queue: str, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, 2 * cards), label="GPUs asked for")
    replicas = 1 if size <= cards else 2
    alone = past("one", LATE, 10, gpus=size // replicas, replicas=replicas, queue=queue)
    there = world_of(
        machine("n1", gpus=cards), machine("n2", gpus=cards), queues=map(team, (*STREAMS, queue))
    )

    found = outcome_of("one", [*crowd(first, second, gpus=cards), alone], there)

    assert found.wait is not None
    assert found.wait <= minutes(max(lasts for _, lasts in first + second))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(kinds, kinds, st.integers(1, 6), st.floats(0, 1))
def test_a_team_with_high_past_usage_waits_until_it_has_decayed(
    first: list[Kind], second: list[Kind], cards: int, history: float
) -> None:
    queues = [*map(team, STREAMS), team("risk", history=history)]
    there = world_of(machine("n1", gpus=cards), queues=queues, assume=Assumptions(half_life=HALF_LIFE))
    whole = past("one", LATE, 10, gpus=cards, queue="risk")

    found = outcome_of("one", [*crowd(first, second, gpus=cards), whole], there)

    assert found.wait is not None
    assert found.wait <= 8 * HALF_LIFE


# ----------------------------------------------------------------------------------------------------- borrowers

BORROWS = Quota(gpus=9)
LENDING = [team("owner", 5), team("large", 0, limit=BORROWS), team("small", 0, limit=BORROWS)]


def test_borrowers_continue_beside_a_job_that_the_owners_keep_waiting() -> None:
    owners = [past(f"owner-{i:03}", 0, 30 + i % 7, queue="owner") for i in range(100)]
    small = [past(f"small-{i:03}", 61 + i, 30, queue="small") for i in range(10)]
    large = past("large", LATE, 30, gpus=9, queue="large")

    found = simulate([*owners, *small, large], world_of(machine(gpus=9), queues=LENDING))

    outcomes = {str(each.job): each for each in found.jobs}
    owners_are_through = max(each.ended_at for each in found.jobs if each.queue == "owner" and each.ended_at)
    waits = [wait for each in small if (wait := outcomes[each.request.job].wait) is not None]
    assert len(waits) == len(small)
    assert max(waits) < minutes(60)
    assert outcomes["large"].started_at == owners_are_through


def lent(*, owners_wait: bool) -> dict[str, Reason | None]:
    """Return why the borrowing jobs wait, while the owner's five jobs run."""
    queues = [Queue(name="owner", quota=Quota(gpus=5)), *LENDING[1:]]
    owners = [job(f"owner-{i}", gpus=1, queue="owner", age=9) for i in range(5)]
    busy = started(world(node("n1", cpus=32, gpus=9), queues=queues, pending=owners))
    next_one = [job("owner-next", gpus=1, queue="owner", age=8)] if owners_wait else []
    borrowers = [job("large", gpus=9, queue="large", age=5), job("small", gpus=1, queue="small", age=1)]

    decisions = decide(with_pending(busy, *next_one, *borrowers))

    return {each.job: each.reason if isinstance(each, Wait) else None for each in decisions}


def test_no_reservation_is_made_for_a_borrower_when_owners_reuse_their_quota() -> None:
    assert lent(owners_wait=True) == {"owner-next": Reason.QUOTA, "large": Reason.CAPACITY, "small": None}


def test_resources_are_reserved_for_a_borrower_when_owners_will_release_them() -> None:
    assert lent(owners_wait=False) == {"large": Reason.CAPACITY, "small": Reason.RESERVED}
