"""Failures around the reconciler: lost nodes, a database that refuses, clocks that jump, and very long queues."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from falaj.control.jobs import reconciler as reconciling
from falaj.control.jobs import staging
from falaj.control.jobs.context import ControllerContext
from falaj.control.jobs.reconciler import Backoff, JobReconciler
from falaj.errors import Conflict, InvalidInput
from falaj.ports.launcher import AttemptState, fence_wait_s
from falaj.records.scheduling.snapshot import Decision, Snapshot
from falaj.records.training.jobs import Job, JobState
from falaj.scheduling import Backlog
from falaj.training import code_archive, store
from falaj.training.queue import LONGEST_PAUSE_S
from falaj.training.tables import attempts
from job_harness import DONE, FAILED, NODE, FakeLauncher, JobHarness
from polling import eventually

HOUR = timedelta(hours=1)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts run in the reconciler's own thread."""

    def run(target: Callable[[], None], **_: Any) -> threading.Thread:
        target()
        return threading.Thread()

    monkeypatch.setattr(reconciling, "start_thread", run)
    monkeypatch.setattr(reconciling, "FIRST_BACKOFF_S", 0.0)


# -------------------------------------------------------------------------------------------- lost nodes


@pytest.mark.slow
def test_a_job_on_a_lost_node_is_requeued_and_resumes_elsewhere(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciling, "LOST_AFTER_S", 0.0)
    light_harness.launcher.program = lambda _: AttemptState("running")
    job, reconciler = light_harness.submit(), light_harness.reconciler()
    reconciler.tick()
    eventually(lambda: light_harness.launcher.runs)
    light_harness.launcher.program = lambda _: DONE

    light_harness.machine.node = NODE.model_copy(update={"name": "there"})
    reconciler.tick()

    eventually(lambda: light_harness.jobs.show(job.id).state is JobState.QUEUED)
    back = light_harness.jobs.show(job.id)
    assert (back.reason, back.preemptions) == ("interrupted: node here is lost", 0)
    reconciler.tick()
    eventually(lambda: light_harness.jobs.show(job.id).state is JobState.DONE)
    assert (light_harness.jobs.show(job.id).attempt, light_harness.jobs.show(job.id).node) == (2, "there")
    assert [row["verdict"] for row in light_harness.platform.rows(attempts)] == ["interrupted", "done"]


@pytest.mark.slow
def test_an_attempt_of_another_home_is_given_up_only_when_it_has_certainly_stopped(
    light_harness: JobHarness,
) -> None:
    harness = light_harness
    harness.launcher.program = lambda _: AttemptState("running")
    harness.host = replace(harness.host, home="home_a", fence_s=120)
    job = harness.submit()
    harness.reconciler().tick()
    eventually(lambda: harness.launcher.runs == {f"{job.id}/1": 1})
    here = FakeLauncher()
    harness.host = replace(harness.host, home="home_b", launcher=here)
    second = harness.reconciler()

    second.tick()
    waiting = harness.jobs.show(job.id)
    second._in_charge_since -= fence_wait_s(120) + 1
    eventually(lambda: second.tick() or harness.jobs.show(job.id).state is JobState.DONE)

    assert (waiting.state, waiting.attempt) == (JobState.RUNNING, 1)
    assert "whose controller is gone" in (waiting.reason or "")
    assert here.runs == {f"{job.id}/2": 1}
    first = harness.platform.rows(attempts)[0]
    assert (first["verdict"], first["reason"]) == ("interrupted", "interrupted: node here is lost")


@pytest.mark.slow
def test_an_attempt_that_was_fenced_is_made_again_and_counts_as_no_failure(light_harness: JobHarness) -> None:
    harness = light_harness
    ends = iter([AttemptState("ended", signal=15, fenced=True, stopped=False), DONE])
    harness.launcher.program = lambda _: next(ends)
    job, reconciler = harness.submit(), harness.reconciler()

    eventually(lambda: reconciler.tick() or harness.jobs.show(job.id).state.ended)

    assert harness.jobs.show(job.id).state is JobState.DONE
    assert [row["verdict"] for row in harness.platform.rows(attempts)] == ["interrupted", "done"]


@pytest.mark.slow
def test_a_node_that_is_briefly_away_is_not_lost(light_harness: JobHarness) -> None:
    light_harness.launcher.program = lambda _: AttemptState("running")
    job, reconciler = light_harness.submit(), light_harness.reconciler()
    reconciler.tick()
    eventually(lambda: light_harness.launcher.runs)

    light_harness.machine.node = NODE.model_copy(update={"name": "there"})
    reconciler.tick()
    light_harness.machine.node = NODE
    reconciler.tick()

    assert light_harness.launcher.stopped == []
    assert light_harness.jobs.show(job.id).state is JobState.RUNNING
    reconciler.stop()


@pytest.mark.slow
def test_an_attempt_on_an_unreachable_node_is_not_started_a_second_time(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a controller on another node takes over: the attempt may still run where it was started."""
    job = light_harness.begin(light_harness.submit())
    light_harness.machine.node = NODE.model_copy(update={"name": "there"})
    reconciler = light_harness.reconciler()

    def looked_at() -> Job:
        reconciler.tick()
        return light_harness.jobs.show(job.id)

    eventually(lambda: looked_at().reason)

    assert light_harness.launcher.runs == {}
    away = light_harness.jobs.show(job.id)
    assert (away.state, away.reason) == (
        JobState.RUNNING,
        "attempt 1 is resumed in 1 s: node here is missing",
    )
    monkeypatch.setattr(reconciling, "LOST_AFTER_S", 0.0)
    eventually(lambda: looked_at().state is JobState.DONE)
    assert light_harness.launcher.runs == {f"{job.id}/2": 1}
    assert [row["verdict"] for row in light_harness.platform.rows(attempts)] == ["interrupted", "done"]


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_a_job_resumes_when_its_node_is_back(light_harness: JobHarness) -> None:
    """As on a lost node, the job did nothing wrong, so it does not count against its retries."""
    job = light_harness.begin(light_harness.submit(retries=0))
    light_harness.launcher.known[f"{job.id}/1"] = AttemptState("lost", node_restarted=True)
    reconciler = light_harness.reconciler()

    for _ in range(2):
        reconciler.tick()

    (first, second) = light_harness.platform.rows(attempts)
    assert (first["verdict"], first["reason"]) == ("interrupted", "interrupted: the machine went down")
    assert (second["verdict"], light_harness.jobs.show(job.id).state) == ("done", JobState.DONE)


# ----------------------------------------------------------------------------------------- concurrent ends


OWN_END = replace(DONE, stopped=False)


@pytest.mark.slow
def test_a_job_that_succeeds_before_the_stop_signal_is_done(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between recording the stop and sending it, which takes as long as the database does."""
    light_harness.launcher.program = lambda _: AttemptState("running")
    job, reconciler = light_harness.submit(), light_harness.reconciler()
    reconciler.tick()
    eventually(lambda: light_harness.launcher.runs)
    real = ControllerContext.update_job

    def update_job(context: ControllerContext, ident: str, **values: Any) -> None:
        real(context, ident, **values)
        light_harness.launcher.known[f"{job.id}/1"] = OWN_END

    monkeypatch.setattr(ControllerContext, "update_job", update_job)
    reconciler.stop()

    done = light_harness.jobs.show(job.id)
    assert (done.state, done.attempt, done.reason) == (JobState.DONE, 1, None)


@pytest.mark.usefixtures("at_once")
def test_an_attempt_is_prepared_while_the_previous_one_is_cleaned_up(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = staging.make_traversable

    def open_to_pass(folder: Path) -> None:
        real(folder)
        monkeypatch.setattr(staging, "make_traversable", real)
        folder.rmdir()  # by the thread of the previous attempt, which finds it empty

    job, reconciler = light_harness.submit(), light_harness.reconciler()
    monkeypatch.setattr(staging, "make_traversable", open_to_pass)
    reconciler.tick()

    done = light_harness.jobs.show(job.id)
    assert (done.state, done.reason) == (JobState.DONE, None)


@pytest.mark.slow
def test_a_reconciler_without_its_lease_removes_nothing_that_the_next_one_runs(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped after it had listed the attempts, and continues much later."""
    light_harness.launcher.program = lambda _: AttemptState("running")
    job, real, next_one = light_harness.submit(), store.running, list[JobReconciler]()

    def take_over() -> None:
        next_one.append(light_harness.reconciler())
        next_one[0].tick()
        eventually(lambda: light_harness.launcher.runs)

    def running(tx: Any) -> list[Any]:
        found = real(tx)
        monkeypatch.setattr(store, "running", real)
        other = threading.Thread(target=take_over)
        other.start()
        other.join()
        return found

    class Lost(Exception):
        pass

    def on_lost() -> NoReturn:
        raise Lost

    monkeypatch.setattr(store, "running", running)
    with pytest.raises(Lost):
        light_harness.reconciler(on_lost=on_lost)

    assert light_harness.launcher.state(f"{job.id}/1").phase == "running"
    next_one[0].stop()


# -------------------------------------------------------------------------------------------- refusals


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_an_attempt_that_cannot_be_settled_is_retried_with_backoff_and_its_job_reports_it(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise Conflict("the run was ended by hand")

    monkeypatch.setattr(reconciling, "FIRST_BACKOFF_S", 3600.0)
    monkeypatch.setattr(light_harness.jobs._runs, "end", refuse)
    job, reconciler = light_harness.submit(), light_harness.reconciler()
    for _ in range(5):
        reconciler.tick()

    assert len(tried) == 1
    stuck = light_harness.jobs.show(job.id)
    assert stuck.state is JobState.RUNNING
    assert stuck.reason == "attempt 1 is resumed in 60 s: the run was ended by hand"
    monkeypatch.undo()
    light_harness.reconciler().tick()
    eventually(lambda: light_harness.jobs.show(job.id).state is JobState.DONE)
    assert light_harness.launcher.runs == {f"{job.id}/1": 1}


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_a_job_that_cannot_start_reports_it_and_blocks_no_other(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = light_harness.jobs._accounts.begin
    bad, tried = light_harness.submit(), []

    def begin(tx: Any, request: Any, **facts: Any) -> None:
        if request.job == bad.id:
            tried.append(1)
            raise InvalidInput("there is no price for it")
        real(tx, request, **facts)

    monkeypatch.setattr(reconciling, "FIRST_BACKOFF_S", 3600.0)
    monkeypatch.setattr(light_harness.jobs._accounts, "begin", begin)
    good, reconciler = light_harness.submit(), light_harness.reconciler()
    for _ in range(3):
        reconciler.tick()

    assert len(tried) == 1
    assert light_harness.jobs.show(good.id).state is JobState.DONE
    waiting = light_harness.jobs.show(bad.id)
    assert waiting.state is JobState.QUEUED
    assert waiting.reason == "it could not be started, and is tried again in 60 s: there is no price for it"


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_the_only_waiting_job_is_retried_after_its_backoff(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refusals = light_harness.jobs._accounts.begin, iter(range(4))

    def begin(*args: Any, **facts: Any) -> None:
        if next(refusals, None) is not None:
            raise InvalidInput("there is no price for it")
        real(*args, **facts)

    clock: Any = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(reconciling, "time", clock)
    monkeypatch.setattr(reconciling, "FIRST_BACKOFF_S", 1.0)
    monkeypatch.setattr(light_harness.jobs._accounts, "begin", begin)
    job, reconciler = light_harness.submit(), light_harness.reconciler()
    for _ in range(200):
        reconciler.tick()
        clock.now += 0.5

    assert light_harness.jobs.show(job.id).state is JobState.DONE


def test_backoff_grows_to_its_limit() -> None:
    backoff = Backoff(first_s=1.0, longest_s=10.0)

    assert [backoff.start("a") for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert backoff.start("b") == 1
    assert backoff.waiting() == ["a", "b"]
    backoff.retain(["b"])
    assert backoff.waiting() == ["b"]
    assert backoff.start("a") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("where", ["opened", "unpacked"])
def test_a_machine_that_is_short_of_open_files_fails_no_job(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Another job may hold them, for a while."""
    shortage = [OSError(errno.EMFILE, "Too many open files")]
    module, name = {"opened": (staging, "_draft"), "unpacked": (code_archive, "_write")}[where]
    real = getattr(module, name)

    def short(*args: Any, **options: Any) -> Any:
        if shortage:
            raise shortage.pop()
        return real(*args, **options)

    monkeypatch.setattr(module, name, short)
    job, reconciler = light_harness.submit(), light_harness.reconciler()
    for _ in range(4):
        reconciler.tick()

    done = light_harness.jobs.show(job.id)
    assert (done.state, done.attempt, done.reason) == (JobState.DONE, 1, None)


# ------------------------------------------------------------------------------------------ clocks that jump


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_clock_jump_during_a_backoff_does_not_delay_the_job(
    light_harness: JobHarness, jump: timedelta
) -> None:
    outcomes = iter([FAILED, DONE])
    light_harness.launcher.program = lambda _: next(outcomes)
    job, reconciler = light_harness.submit(retries=1), light_harness.reconciler()
    reconciler.tick()
    assert light_harness.jobs.show(job.id).state is JobState.QUEUED

    light_harness.platform.clock.advance(jump)
    for _ in range(2):
        reconciler.tick()

    done = light_harness.jobs.show(job.id)
    assert (done.state, done.attempt) == (JobState.DONE, 2)
    assert light_harness.launcher.runs == {f"{job.id}/1": 1, f"{job.id}/2": 1}


def test_a_clock_set_back_lengthens_a_backoff_by_at_most_its_limit(
    light_harness: JobHarness,
) -> None:
    job = light_harness.submit(retries=1)
    light_harness.begin(job)
    light_harness.finish(job, "failed")
    clock = light_harness.platform.clock

    clock.advance(timedelta(seconds=-100))

    due = light_harness.jobs.explain(job.id).expected_start
    assert due is not None
    assert due - clock() <= timedelta(seconds=LONGEST_PAUSE_S)


@pytest.mark.slow
@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_clock_jump_while_a_job_runs_loses_nothing(light_harness: JobHarness, jump: timedelta) -> None:
    light_harness.launcher.program = lambda _: AttemptState("running")
    job, waiting = light_harness.submit(cpus=3, timeout="PT10M"), light_harness.submit(cpus=3)
    reconciler = light_harness.reconciler()
    reconciler.tick()
    eventually(lambda: light_harness.launcher.runs)

    light_harness.platform.clock.advance(jump)
    reconciler.tick()
    assert light_harness.jobs.show(waiting.id).state is JobState.QUEUED
    light_harness.launcher.known[f"{job.id}/1"] = DONE
    eventually(lambda: light_harness.jobs.show(job.id).state is JobState.DONE)
    reconciler.tick()

    done = light_harness.jobs.show(job.id)
    assert done.started_at is not None
    assert done.ended_at is not None
    assert done.ended_at >= done.started_at
    hours = light_harness.platform.rows_of(
        "SELECT cpu_hours FROM scheduling_usage WHERE ended_at IS NOT NULL"
    )
    assert all(each >= 0 for each in hours)
    assert light_harness.jobs.show(waiting.id).state is JobState.RUNNING
    assert set(light_harness.launcher.runs.values()) == {1}
    reconciler.stop()


# ------------------------------------------------------------------------------------------- long queues


@pytest.fixture
def decided(light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of waiting jobs at each decision."""
    seen: list[int] = []
    real = reconciling.decide_from

    def decide(backlog: Backlog, snapshot: Snapshot) -> tuple[Decision, ...]:
        seen.append(len(backlog))
        return real(backlog, snapshot)

    monkeypatch.setattr(reconciling, "decide_from", decide)
    light_harness.launcher.program = lambda _: AttemptState("running")
    return seen


@pytest.mark.slow
def test_an_unchanged_queue_is_not_scheduled_again(light_harness: JobHarness, decided: list[int]) -> None:
    first, reconciler = light_harness.submit(cpus=4), light_harness.reconciler()
    reconciler.tick()
    light_harness.submit(cpus=4)
    for _ in range(5):
        reconciler.tick()
    after_submit = len(decided)

    for _ in range(5):
        reconciler.tick()
    assert len(decided) == after_submit
    light_harness.submit(cpus=4)
    reconciler.tick()
    assert decided[-1] == 2

    light_harness.launcher.known[f"{first.id}/1"] = DONE
    eventually(lambda: light_harness.jobs.show(first.id).state is JobState.DONE)
    reconciler.tick()
    assert len(light_harness.jobs.list(state=JobState.RUNNING).items) == 1
    reconciler.stop()


@pytest.mark.slow
def test_new_nodes_and_passing_time_trigger_a_decision(
    light_harness: JobHarness, decided: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    light_harness.submit(cpus=4)
    waiting, reconciler = light_harness.submit(cpus=4), light_harness.reconciler()
    for _ in range(3):
        reconciler.tick()
    before = len(decided)

    monkeypatch.setattr(reconciling, "RECONSIDER_S", 0.0)
    reconciler.tick()
    assert len(decided) == before + 1
    light_harness.machine.node = NODE.model_copy(update={"cpus": 8})
    monkeypatch.setattr(reconciling, "RECONSIDER_S", 3600.0)
    reconciler.tick()

    assert light_harness.jobs.show(waiting.id).state is JobState.RUNNING
    reconciler.stop()


def test_the_request_of_a_job_is_parsed_once(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = light_harness.submit(cpus=2, queue="default", group="a")
    queue, platform = light_harness.jobs.queue, light_harness.platform

    def look() -> Any:
        with platform.database.read() as tx:
            (request,) = queue.snapshot(tx, (NODE,), now=platform.clock()).snapshot.pending
        return request

    first = look()
    assert look() is first
    assert (first.job, first.each.cpus, first.group, first.workspace) == (job.id, 2, "a", job.workspace)
    platform.sql("UPDATE training_jobs SET claim = true")
    assert look().claim
    assert look() == first.model_copy(update={"claim": True})
