"""A job makes room for another: it is told once, saves itself, goes back to the queue, and later goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from crash_points import CrashPoint, Killed
from falaj.control.jobs import reconciler as reconciling
from falaj.errors import Conflict
from falaj.governance.operations.caller import on_terms
from falaj.ports.launcher import AttemptState
from falaj.records.scheduling.snapshot import Decision, Evict, Placement, Reason, Snapshot, Start, Wait
from falaj.records.training.jobs import Job, JobState
from falaj.scheduling import Backlog
from falaj.training.tables import attempts, jobs
from job_harness import DONE, JobHarness
from polling import eventually

LAST = -5


def urgent_first(_: Backlog, snapshot: Snapshot) -> tuple[Decision, ...]:
    """A scheduler for a machine with one place: the highest priority has it, and whoever is there makes room."""
    waiting = sorted(snapshot.pending, key=lambda each: (not each.claim, -each.priority, each.job))
    if not waiting:
        return ()
    first = waiting[0]
    if not snapshot.running:
        return (Start(job=first.job, placements=(Placement(replica=0, node="here"),), borrows=True),)
    (running,) = snapshot.running
    if running.request.priority < first.priority and not running.leaving:
        evict = Evict(job=running.request.job, by=first.job, why="priority")
        return (evict, Wait(job=first.job, reason=Reason.PREEMPTING))
    return (Wait(job=first.job, reason=Reason.CAPACITY),)


@pytest.fixture
def harness(light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> JobHarness:
    """One place, and jobs that run until they are stopped; those with a high priority are done at once."""
    monkeypatch.setattr(reconciling, "decide_from", urgent_first)
    light_harness.launcher.program = lambda launch: (
        DONE if launch.environment.get("ENDS") else AttemptState("running")
    )
    return light_harness


def row(harness: JobHarness, job: Job) -> dict[str, Any]:
    return next(each for each in harness.platform.rows(jobs) if each["id"] == job.id)


def running(harness: JobHarness, job: Job, number: int = 1) -> None:
    eventually(lambda: harness.launcher.state(f"{job.id}/{number}").phase == "running")


def test_a_job_makes_room_and_goes_on_afterwards(harness: JobHarness) -> None:
    victim, reconciler = harness.submit(priority=LAST), harness.reconciler()
    reconciler.tick()
    running(harness, victim)
    urgent = harness.submit(env={"ENDS": "1"})

    reconciler.tick()

    assert (row(harness, victim)["leaving"], row(harness, victim)["evicted_for"]) == (True, urgent.id)
    assert (row(harness, urgent)["claim"], row(harness, victim)["borrows"]) == (True, True)
    reconciler.tick()
    eventually(lambda: harness.jobs.show(victim.id).state is JobState.QUEUED)
    back = harness.jobs.show(victim.id)
    assert (back.preemptions, back.leaving) == (1, False)
    assert back.reason == f"preempted: it made room for job {urgent.id}"
    assert back.submitted_at == victim.submitted_at
    assert harness.launcher.stopped == [(f"{victim.id}/1")]
    assert harness.launcher.graces == [60.0]
    reconciler.tick()
    eventually(lambda: harness.jobs.show(urgent.id).state is JobState.DONE)
    assert not row(harness, urgent)["claim"]
    reconciler.tick()
    running(harness, victim, 2)
    again = harness.jobs.show(victim.id)
    assert (again.attempt, again.reason, row(harness, victim)["failures"]) == (2, None, 0)
    assert [each["verdict"] for each in harness.platform.rows(attempts) if each["job"] == victim.id] == [
        "preempted",
        None,
    ]
    reconciler.stop()


def test_one_that_ends_before_it_is_told_is_done(harness: JobHarness) -> None:
    victim, reconciler = harness.submit(priority=LAST), harness.reconciler()
    reconciler.tick()
    running(harness, victim)
    harness.submit(env={"ENDS": "1"})
    reconciler.tick()

    harness.launcher.known[f"{victim.id}/1"] = DONE

    eventually(lambda: harness.jobs.show(victim.id).state.ended)
    done = harness.jobs.show(victim.id)
    assert (done.state, done.preemptions, done.leaving) == (JobState.DONE, 0, False)
    reconciler.stop()


def test_one_that_ends_well_after_it_was_told_is_not_taken_for_done(harness: JobHarness) -> None:
    """It may have saved half of the work, and ended as one does."""
    victim, reconciler = harness.submit(priority=LAST), harness.reconciler()
    reconciler.tick()
    running(harness, victim)
    harness.submit(env={"ENDS": "1"})
    harness.launcher.ends_with = DONE
    reconciler.tick()

    reconciler.tick()

    eventually(lambda: harness.jobs.show(victim.id).state is JobState.QUEUED)
    assert harness.jobs.show(victim.id).preemptions == 1
    reconciler.stop()


def test_a_job_that_makes_room_can_be_cancelled_and_is_then_given_less_time(harness: JobHarness) -> None:
    victim, reconciler = harness.submit(priority=LAST, retries=3), harness.reconciler()
    reconciler.tick()
    running(harness, victim)
    harness.submit(env={"ENDS": "1"})
    harness.launcher.ends_with = None  # it takes its time
    reconciler.tick()
    reconciler.tick()
    eventually(lambda: harness.launcher.graces == [60.0])

    harness.jobs.cancel(victim.id)
    harness.launcher.ends_with = AttemptState("ended", signal=15)
    reconciler.tick()

    eventually(lambda: harness.jobs.show(victim.id).state is JobState.CANCELLED)
    assert harness.launcher.graces == [60.0, 10.0]
    reconciler.stop()


def test_the_claim_of_a_job_that_is_cancelled_is_dropped(harness: JobHarness) -> None:
    victim, reconciler = harness.submit(priority=LAST), harness.reconciler()
    reconciler.tick()
    running(harness, victim)
    urgent = harness.submit()
    reconciler.tick()
    assert row(harness, urgent)["claim"]

    harness.jobs.cancel(urgent.id)

    assert not row(harness, urgent)["claim"]
    reconciler.tick()
    eventually(lambda: harness.jobs.show(victim.id).state is JobState.QUEUED)
    assert not harness.jobs.retry(urgent.id).leaving
    assert not row(harness, urgent)["claim"]
    reconciler.stop()


@pytest.mark.parametrize("ended", ["victim", "urgent"])
def test_nobody_is_told_to_leave_for_a_job_that_does_not_wait(harness: JobHarness, ended: str) -> None:
    victim, urgent = harness.submit(priority=LAST), harness.submit()
    harness.begin(victim)
    if ended == "victim":
        harness.finish(victim, "done")
    else:
        harness.jobs.cancel(urgent.id)

    with harness.as_controller(), on_terms(fence=harness.fence), pytest.raises(Conflict):
        harness.jobs.preempt_for(urgent.id, leaving=(victim.id,))

    assert not any(each["leaving"] or each["claim"] for each in harness.platform.rows(jobs))


def test_who_leaves_for_whom_is_written_down_for_all_or_for_none(harness: JobHarness) -> None:
    there, gone, urgent = (harness.submit() for _ in range(3))
    harness.begin(there)

    with harness.as_controller(), on_terms(fence=harness.fence), pytest.raises(Conflict):
        harness.jobs.preempt_for(urgent.id, leaving=(there.id, gone.id))

    assert not any(each["leaving"] or each["claim"] for each in harness.platform.rows(jobs))


# ------------------------------------------------------------------------------------------ killed anywhere


class Parked(threading.Thread):
    """The thread of an attempt that nothing is asked of: it runs on until the reconciler is gone."""

    def is_alive(self) -> bool:
        return True


def test_killed_at_any_step_nobody_leaves_twice_and_nothing_is_lost(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(target: Callable[[], None], **_: Any) -> threading.Thread:
        attempt = target.__self__  # type: ignore[attr-defined]
        launch = harness.launcher.state(attempt.name)
        if launch.phase == "running" and attempt._requested is None:
            return Parked()
        target()
        return threading.Thread()

    harness.launcher.program = lambda _: DONE
    monkeypatch.setattr(reconciling, "start_thread", at_once)
    trap = CrashPoint(harness, monkeypatch, launcher=("start", "stop", "delete"))
    step, was_killed = 0, True
    while was_killed:
        victim = harness.begin(harness.submit(priority=LAST))
        harness.launcher.known[f"{victim.id}/1"] = AttemptState("running")
        harness.launcher.runs[f"{victim.id}/1"] = 1
        urgent = harness.submit()
        trap.left, was_killed = step, False
        for _ in range(8):
            ended = [harness.jobs.show(job.id) for job in (victim, urgent)]
            if all(job.state.ended for job in ended):
                break
            try:
                harness.reconciler().tick()
            except Killed:
                was_killed = True

        assert [(job.state, job.attempt, job.preemptions) for job in ended] == [
            (JobState.DONE, 2, 1),
            (JobState.DONE, 1, 0),
        ], step
        assert set(harness.launcher.runs.values()) == {1}, step
        step += 1

    told = [entry for entry in harness.platform.entries() if entry["action"] == "jobs.preempt_for"]
    assert len([entry for entry in told if entry["outcome"] == "done"]) == step
    assert step > 20, step
