"""Replays on a virtual clock, compared with figures computed by hand."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import pytest

from falaj.errors import InvalidInput
from falaj.records.names import ObjectId
from falaj.records.scheduling.simulation import Assumptions, JobOutcome, Outage, SimulationResult
from falaj.records.scheduling.snapshot import Budget, Price, Queue, Reason
from falaj.scheduling import decide
from falaj.scheduling.simulator import simulate
from falaj.scheduling.simulator.event_queue import EventQueue, NodeLoss
from simulator_fixtures import (
    MIDNIGHT,
    RecordingScheduler,
    at,
    machine,
    many,
    minutes,
    one_by_one,
    past,
    team,
    world_of,
)

CAREFUL = Assumptions(grace=minutes(5), checkpoint_every=minutes(10))


def of(found: SimulationResult, job: str) -> JobOutcome:
    return next(outcome for outcome in found.jobs if outcome.job == job)


# ------------------------------------------------------------------------------------------ waits and cost


def test_waits_use_and_cost_are_as_worked_out_by_hand() -> None:
    jobs = [past("a", 0, 60, gpus=2), past("b", 10, 30), past("c", 20, 30)]
    world = world_of(machine(gpus=2)).model_copy(update={"price": Price(cpu=0.1, gpus={"H200": 2.0})})

    found = simulate(jobs, world)

    assert [of(found, job).wait for job in "abc"] == [minutes(0), minutes(50), minutes(40)]
    total = found.total
    assert (total.wait.mean, total.wait.median, total.wait.p95) == (minutes(30), minutes(40), minutes(49))
    assert total.slowdown == pytest.approx((1 + 80 / 30 + 70 / 30) / 3)
    assert (total.gpu_hours, total.cpu_hours) == pytest.approx((3.0, 2.0))
    assert total.cost == pytest.approx(3 * 2.0 + 2 * 0.1)
    assert total.gpu_use == pytest.approx(1.0)
    assert total.cpu_use == pytest.approx(2 / (64 * 1.5))
    assert (found.began, found.ended) == (at(0), at(90))


def test_a_gpu_is_priced_by_model_and_fraction() -> None:
    part = past("part", 0, 60)
    each = part.request.each.model_copy(update={"gpu_milli": 250})
    part = part.model_copy(update={"request": part.request.model_copy(update={"each": each})})
    world = world_of(machine(model="T4")).model_copy(update={"price": Price(gpu=4.0, gpus={"H200": 9.0})})

    found = simulate([part], world, scheduler=one_by_one)

    assert (found.total.gpu_hours, found.total.cost) == pytest.approx((0.25, 1.0))


def test_a_time_limit_ends_a_job_that_computes_longer() -> None:
    found = simulate([past("long", 0, 60, limit=30), past("next", 0, 10, limit=30)], world_of())

    assert (of(found, "long").end, of(found, "long").ended_at) == ("timed-out", at(30))
    assert (of(found, "next").end, of(found, "next").wait) == ("done", minutes(30))
    assert found.total.timed_out == 1


def test_a_job_that_can_never_start_has_a_reason_and_no_wait() -> None:
    found = simulate([past("huge", 0, 60, gpus=9), past("fits", 0, 60)], world_of())

    assert (of(found, "huge").end, of(found, "huge").reason) == ("waiting", Reason.TOO_LARGE)
    assert (found.total.never_started, found.total.ended, found.total.wait.mean) == (1, 1, minutes(0))
    assert found.fairness.queues == ()


def test_figures_are_reported_by_team() -> None:
    jobs = [past("a", 0, 60, queue="risk"), past("b", 0, 30, queue="research")]

    found = simulate(jobs, world_of(queues=[team("risk"), team("research")]))

    figures = {each.queue: each.figures for each in found.teams}
    assert {name: each.gpu_hours for name, each in figures.items()} == {"risk": 1.0, "research": 0.5}
    assert sum(each.gpu_use for each in figures.values()) == pytest.approx(found.total.gpu_use)


def test_no_jobs_and_a_job_twice_are_refused() -> None:
    with pytest.raises(InvalidInput, match="at least one job"):
        simulate([], world_of())
    with pytest.raises(InvalidInput, match="occurs more than once"):
        simulate([past("a", 0, 1), past("a", 1, 1)], world_of())


# ---------------------------------------------------------------------------------------------- evictions


def test_an_evicted_job_stops_after_its_grace_and_resumes_from_its_checkpoint() -> None:
    jobs = [past("victim", 0, 60), past("urgent", 25, 10, priority=1)]
    world = world_of(assume=CAREFUL).model_copy(update={"price": Price(gpu=1.0)})

    found = simulate(jobs, world, scheduler=one_by_one)

    urgent, victim = of(found, "urgent"), of(found, "victim")
    assert (urgent.wait, urgent.ended_at) == (minutes(5), at(40))
    assert (victim.evicted, victim.lost, victim.ended_at) == (1, minutes(5), at(80))
    assert (victim.ran, victim.wait) == (minutes(30 + 40), minutes(0))
    assert found.total.cost == pytest.approx((70 + 10) / 60)
    assert (found.total.preemptions, found.total.lost) == (1, minutes(5))


def test_a_job_that_checkpoints_on_eviction_loses_nothing() -> None:
    jobs = [past("victim", 0, 60), past("urgent", 25, 10, priority=1)]

    found = simulate(jobs, world_of(assume=Assumptions(grace=minutes(5))), scheduler=one_by_one)

    assert (of(found, "victim").lost, of(found, "victim").ended_at) == (minutes(0), at(75))


def test_the_scheduler_sees_leaving_jobs_and_claims() -> None:
    jobs = [past("victim", 0, 60), past("urgent", 25, 10, priority=1), past("late", 27, 1)]
    watched = RecordingScheduler(one_by_one)

    simulate(jobs, world_of(assume=CAREFUL), scheduler=watched)

    between = next(each for each in watched.seen if each.now == at(27))
    assert [running.leaving for running in between.running] == [True]
    assert {request.job: request.claim for request in between.pending} == {"urgent": True, "late": False}
    later = next(each for each in watched.seen if each.now == at(40))
    assert not any(request.claim for request in later.pending)
    victim = next(request for request in later.pending if request.job == "victim")
    assert victim.submitted_at == at(0)


# ------------------------------------------------------------------------------- machines, history, budgets


def test_a_lost_node_sends_its_job_back_and_takes_it_again_when_it_is_back() -> None:
    outage = Outage(node="n1", lost_at=at(25), back_at=at(50))
    world = world_of(assume=CAREFUL).model_copy(update={"outages": (outage,)})

    found = simulate([past("a", 0, 60)], world)

    a = of(found, "a")
    assert (a.displaced, a.evicted, a.lost, a.ended_at) == (1, 0, minutes(5), at(50 + 40))
    assert found.total.gpu_use == pytest.approx((25 + 40) / (25 + 40))


def test_history_is_the_share_held_halved_by_its_half_life_for_all_above_too() -> None:
    queues = [Queue(name="bank"), Queue(name="risk", parent="bank"), Queue(name="idle", history=0.5)]
    watched = RecordingScheduler(decide)
    jobs = [past("a", 0, 60, queue="risk"), past("b", 60, 1, queue="idle"), past("c", 120, 1, queue="idle")]

    simulate(jobs, world_of(queues=queues, assume=Assumptions(half_life=minutes(60))), scheduler=watched)

    seen = {each.now: {queue.name: queue.history for queue in each.queues} for each in watched.seen}
    assert seen[at(0)] == {"bank": 0, "risk": 0, "idle": 0.5}
    assert seen[at(60)] == pytest.approx({"bank": 0.5, "risk": 0.5, "idle": 0.25})
    assert seen[at(120)]["bank"] == pytest.approx(0.25)


def test_budgets_shrink_by_ended_and_running_jobs() -> None:
    watched = RecordingScheduler(one_by_one)
    world = world_of().model_copy(
        update={
            "price": Price(gpu=3.0),
            "budgets": (Budget(workspace=ObjectId("w"), gpu_hours=5, money=10),),
        }
    )
    jobs = [past("a", 0, 60, workspace="w"), past("b", 30, 60, workspace="w"), past("c", 90, 1)]

    simulate(jobs, world, scheduler=watched)

    left = {each.now: (each.budgets[0].gpu_hours, each.budgets[0].money) for each in watched.seen}
    assert left[at(0)] == (5, 10)
    assert left[at(30)] == pytest.approx((4.5, 8.5))
    assert left[at(90)] == pytest.approx((3.5, 5.5))


# ----------------------------------------------------------------------------------------- the clock itself


def test_decisions_are_as_far_apart_as_was_assumed() -> None:
    watched = RecordingScheduler(one_by_one)
    jobs = [past("a", 0, 60), past("b", 1, 1), past("c", 2, 1), past("d", 2.5, 1)]

    simulate(jobs, world_of(assume=Assumptions(decide_every=minutes(10))), scheduler=watched)

    moments = [each.now for each in watched.seen]
    assert moments[:2] == [at(0), at(10)]
    assert all(later - earlier >= minutes(10) for earlier, later in pairwise(moments))


def test_the_clock_never_goes_back() -> None:
    watched = RecordingScheduler(decide)
    agenda = EventQueue(at(5))

    simulate(many(3, 60), world_of(machine(gpus=2)), scheduler=watched)

    moments = [each.now for each in watched.seen]
    assert moments == sorted(moments)
    with pytest.raises(ValueError, match="before the current time"):
        agenda.at(at(4), NodeLoss("n1"))


def test_progress_counts_every_job_that_ends() -> None:
    reports: list[tuple[int, int]] = []

    simulate(
        [past("a", 0, 1), past("b", 0, 1)], world_of(), progress=lambda done, of: reports.append((done, of))
    )

    assert reports == [(1, 2), (2, 2)]


def test_job_durations_are_hidden_from_the_scheduler() -> None:
    watched = RecordingScheduler(one_by_one)

    simulate([past("a", 0, 7, limit=60), past("b", 0, 7)], world_of(), scheduler=watched)

    assert watched.seen[1].now == MIDNIGHT + timedelta(minutes=7)
    first = watched.seen[0]
    assert [request.time_limit for request in first.pending] == [minutes(60), None]
