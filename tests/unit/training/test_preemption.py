"""A preempted job is stopped once, saves a checkpoint, returns to the queue, and resumes later."""

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
    """A scheduler for a node with one slot, which the highest priority gets; the running job is preempted."""
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
    """A harness with one slot, and jobs that run until they are stopped; those with a high priority end at once."""
    monkeypatch.setattr(reconciling, "decide_from", urgent_first)
    light_harness.launcher.program = lambda launch: (
        DONE if launch.environment.get("ENDS") else AttemptState("running")
    )
    return light_harness


def row(harness: JobHarness, job: Job) -> dict[str, Any]:
    return next(each for each in harness.platform.rows(jobs) if each["id"] == job.id)


def running(harness: JobHarness, job: Job, number: int = 1) -> None:
    eventually(lambda: harness.launcher.state(f"{job.id}/{number}").phase == "running")


@pytest.mark.slow
def test_a_preempted_job_resumes_afterwards(harness: JobHarness) -> None:
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


@pytest.mark.slow
def test_a_job_that_ends_before_the_stop_signal_is_done(harness: JobHarness) -> None:
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


@pytest.mark.slow
def test_a_job_that_exits_cleanly_after_the_stop_signal_is_not_done(harness: JobHarness) -> None:
    """It may have saved half of the work, and exited cleanly."""
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


@pytest.mark.slow
def test_a_job_being_preempted_can_be_cancelled_with_a_shorter_grace(harness: JobHarness) -> None:
    victim, reconciler = harness.submit(priority=LAST, retries=3), harness.reconciler()
    reconciler.tick()
    running(harness, victim)
    harness.submit(env={"ENDS": "1"})
    harness.launcher.ends_with = None  # it stops slowly
    reconciler.tick()
    reconciler.tick()
    eventually(lambda: harness.launcher.graces == [60.0])

    harness.jobs.cancel(victim.id)
    harness.launcher.ends_with = AttemptState("ended", signal=15)
    reconciler.tick()

    eventually(lambda: harness.jobs.show(victim.id).state is JobState.CANCELLED)
    assert harness.launcher.graces == [60.0, 10.0]
    reconciler.stop()


@pytest.mark.slow
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
def test_no_job_is_preempted_for_a_job_that_does_not_wait(harness: JobHarness, ended: str) -> None:
    victim, urgent = harness.submit(priority=LAST), harness.submit()
    harness.begin(victim)
    if ended == "victim":
        harness.finish(victim, "done")
    else:
        harness.jobs.cancel(urgent.id)

    with harness.as_controller(), on_terms(fence=harness.fence), pytest.raises(Conflict):
        harness.jobs.preempt_for(urgent.id, leaving=(victim.id,))

    assert not any(each["leaving"] or each["claim"] for each in harness.platform.rows(jobs))


def test_a_preemption_is_recorded_for_all_victims_or_none(harness: JobHarness) -> None:
    there, gone, urgent = (harness.submit() for _ in range(3))
    harness.begin(there)

    with harness.as_controller(), on_terms(fence=harness.fence), pytest.raises(Conflict):
        harness.jobs.preempt_for(urgent.id, leaving=(there.id, gone.id))

    assert not any(each["leaving"] or each["claim"] for each in harness.platform.rows(jobs))


# --------------------------------------------------------------------------------------- killed at any step


class Parked(threading.Thread):
    """The thread of an attempt that keeps running until the reconciler is gone."""

    def is_alive(self) -> bool:
        return True


@pytest.mark.slow
def test_a_kill_at_any_step_preempts_no_job_twice_and_loses_nothing(
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

    recorded = [entry for entry in harness.platform.entries() if entry["action"] == "jobs.preempt_for"]
    assert len([entry for entry in recorded if entry["outcome"] == "done"]) == step
    assert step > 20, step
