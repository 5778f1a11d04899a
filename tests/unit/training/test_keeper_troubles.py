"""What keeps a keeper from its work: lost nodes, a database that refuses, clocks that jump, and very long queues."""

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

from falaj.control import jobs as keeping
from falaj.control import occasions, resting, staging
from falaj.control.jobs import JobKeeper
from falaj.control.office import Office
from falaj.control.resting import Rests
from falaj.errors import Conflict, InvalidInput
from falaj.ports.launcher import AttemptState
from falaj.records.scheduling.snapshot import Decision, Snapshot
from falaj.records.training.jobs import Job, JobState
from falaj.scheduling import Backlog
from falaj.training import packing, store
from falaj.training.settling import LONGEST_PAUSE_S
from falaj.training.tables import attempts
from job_ground import DONE, FAILED, NODE, JobGround
from polling import eventually

HOUR = timedelta(hours=1)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts live in the keeper's own thread."""

    def run(target: Callable[[], None], **_: Any) -> threading.Thread:
        target()
        return threading.Thread()

    monkeypatch.setattr(keeping, "start_thread", run)
    monkeypatch.setattr(keeping, "AGAIN_S", 0.0)


# -------------------------------------------------------------------------------------------- lost nodes


def test_a_job_on_a_lost_node_goes_back_to_the_queue_and_on_elsewhere(
    light_ground: JobGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "LOST_AFTER_S", 0.0)
    light_ground.launcher.program = lambda _: AttemptState("running")
    job, keeper = light_ground.submit(), light_ground.keeper()
    keeper.tick()
    eventually(lambda: light_ground.launcher.runs)
    light_ground.launcher.program = lambda _: DONE

    light_ground.machine.node = NODE.model_copy(update={"name": "there"})
    keeper.tick()

    eventually(lambda: light_ground.jobs.show(job.id).state is JobState.QUEUED)
    back = light_ground.jobs.show(job.id)
    assert (back.reason, back.preemptions) == ("interrupted: node here is lost", 0)
    keeper.tick()
    eventually(lambda: light_ground.jobs.show(job.id).state is JobState.DONE)
    assert (light_ground.jobs.show(job.id).attempt, light_ground.jobs.show(job.id).node) == (2, "there")
    assert [row["verdict"] for row in light_ground.platform.rows(attempts)] == ["interrupted", "done"]


def test_a_node_that_is_away_for_a_moment_is_not_lost(light_ground: JobGround) -> None:
    light_ground.launcher.program = lambda _: AttemptState("running")
    job, keeper = light_ground.submit(), light_ground.keeper()
    keeper.tick()
    eventually(lambda: light_ground.launcher.runs)

    light_ground.machine.node = NODE.model_copy(update={"name": "there"})
    keeper.tick()
    light_ground.machine.node = NODE
    keeper.tick()

    assert light_ground.launcher.stopped == []
    assert light_ground.jobs.show(job.id).state is JobState.RUNNING
    keeper.stop()


def test_an_attempt_on_a_node_that_is_not_seen_from_here_is_not_started_here_as_well(
    light_ground: JobGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a controller on another machine takes over: where it was begun, it may run still."""
    job = light_ground.begin(light_ground.submit())
    light_ground.machine.node = NODE.model_copy(update={"name": "there"})
    keeper = light_ground.keeper()

    def looked_at() -> Job:
        keeper.tick()
        return light_ground.jobs.show(job.id)

    eventually(lambda: looked_at().reason)

    assert light_ground.launcher.runs == {}
    away = light_ground.jobs.show(job.id)
    assert (away.state, away.reason) == (
        JobState.RUNNING,
        "attempt 1 is taken up again in 1 s: node here is not there",
    )
    monkeypatch.setattr(keeping, "LOST_AFTER_S", 0.0)
    eventually(lambda: looked_at().state is JobState.DONE, within=30)
    assert light_ground.launcher.runs == {f"{job.id}/2": 1}
    assert [row["verdict"] for row in light_ground.platform.rows(attempts)] == ["interrupted", "done"]


@pytest.mark.usefixtures("at_once")
def test_a_job_whose_machine_went_down_goes_on_when_it_is_there_again(light_ground: JobGround) -> None:
    """As one on a node that is lost: nothing that the job has done, so it does not count against its retries."""
    job = light_ground.begin(light_ground.submit(retries=0))
    light_ground.launcher.known[f"{job.id}/1"] = AttemptState("lost", went_down=True)
    keeper = light_ground.keeper()

    for _ in range(2):
        keeper.tick()

    (first, second) = light_ground.platform.rows(attempts)
    assert (first["verdict"], first["reason"]) == ("interrupted", "interrupted: the machine went down")
    assert (second["verdict"], light_ground.jobs.show(job.id).state) == ("done", JobState.DONE)


# ----------------------------------------------------------------------------------- ends at the same time


OWN_END = replace(DONE, stopped=False)


def test_one_that_ends_well_before_it_hears_that_it_should_is_done(
    light_ground: JobGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between writing down that it is told and telling it, which takes as long as the database does."""
    light_ground.launcher.program = lambda _: AttemptState("running")
    job, keeper = light_ground.submit(), light_ground.keeper()
    keeper.tick()
    eventually(lambda: light_ground.launcher.runs)
    real = Office.note

    def note(office: Office, ident: str, **values: Any) -> None:
        real(office, ident, **values)
        light_ground.launcher.known[f"{job.id}/1"] = OWN_END

    monkeypatch.setattr(Office, "note", note)
    keeper.stop()

    done = light_ground.jobs.show(job.id)
    assert (done.state, done.attempt, done.reason) == (JobState.DONE, 1, None)


@pytest.mark.usefixtures("at_once")
def test_an_attempt_is_prepared_while_what_is_left_of_the_one_before_is_cleared_up(
    light_ground: JobGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = staging.open_to_pass

    def open_to_pass(folder: Path) -> None:
        real(folder)
        monkeypatch.setattr(staging, "open_to_pass", real)
        folder.rmdir()  # by the thread of the attempt before, which finds it empty

    job, keeper = light_ground.submit(), light_ground.keeper()
    monkeypatch.setattr(staging, "open_to_pass", open_to_pass)
    keeper.tick()

    done = light_ground.jobs.show(job.id)
    assert (done.state, done.reason) == (JobState.DONE, None)


def test_a_keeper_that_lost_its_lease_clears_up_nothing_that_the_next_one_runs(
    light_ground: JobGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped after it had looked what runs, and goes on much later."""
    light_ground.launcher.program = lambda _: AttemptState("running")
    job, real, next_one = light_ground.submit(), store.running, list[JobKeeper]()

    def take_over() -> None:
        next_one.append(light_ground.keeper())
        next_one[0].tick()
        eventually(lambda: light_ground.launcher.runs)

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
        light_ground.keeper(on_lost=on_lost)

    assert light_ground.launcher.state(f"{job.id}/1").phase == "running"
    next_one[0].stop()


# -------------------------------------------------------------------------------------------- refusals


@pytest.mark.usefixtures("at_once")
def test_an_attempt_that_cannot_be_settled_is_tried_again_less_and_less_often_and_its_job_says_so(
    light_ground: JobGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise Conflict("the run was ended by hand")

    monkeypatch.setattr(keeping, "AGAIN_S", 3600.0)
    monkeypatch.setattr(light_ground.jobs._runs, "end", refuse)
    job, keeper = light_ground.submit(), light_ground.keeper()
    for _ in range(5):
        keeper.tick()

    assert len(tried) == 1
    stuck = light_ground.jobs.show(job.id)
    assert stuck.state is JobState.RUNNING
    assert stuck.reason == "attempt 1 is taken up again in 60 s: the run was ended by hand"
    monkeypatch.undo()
    light_ground.keeper().tick()
    eventually(lambda: light_ground.jobs.show(job.id).state is JobState.DONE)
    assert light_ground.launcher.runs == {f"{job.id}/1": 1}


@pytest.mark.usefixtures("at_once")
def test_a_job_that_cannot_be_begun_says_so_and_holds_nobody_up(
    light_ground: JobGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = light_ground.jobs._accounts.begin
    bad, tried = light_ground.submit(), []

    def begin(tx: Any, request: Any, **facts: Any) -> None:
        if request.job == bad.id:
            tried.append(1)
            raise InvalidInput("there is no price for it")
        real(tx, request, **facts)

    monkeypatch.setattr(keeping, "AGAIN_S", 3600.0)
    monkeypatch.setattr(light_ground.jobs._accounts, "begin", begin)
    good, keeper = light_ground.submit(), light_ground.keeper()
    for _ in range(3):
        keeper.tick()

    assert len(tried) == 1
    assert light_ground.jobs.show(good.id).state is JobState.DONE
    waiting = light_ground.jobs.show(bad.id)
    assert waiting.state is JobState.QUEUED
    assert waiting.reason == "it could not be begun, and is tried again in 60 s: there is no price for it"


@pytest.mark.usefixtures("at_once")
def test_the_only_job_that_waits_is_tried_again_however_long_it_rests(
    light_ground: JobGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refusals = light_ground.jobs._accounts.begin, iter(range(4))

    def begin(*args: Any, **facts: Any) -> None:
        if next(refusals, None) is not None:
            raise InvalidInput("there is no price for it")
        real(*args, **facts)

    clock: Any = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    for module in (keeping, occasions, resting):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(keeping, "AGAIN_S", 1.0)
    monkeypatch.setattr(light_ground.jobs._accounts, "begin", begin)
    job, keeper = light_ground.submit(), light_ground.keeper()
    for _ in range(200):
        keeper.tick()
        clock.now += 0.5

    assert light_ground.jobs.show(job.id).state is JobState.DONE


def test_rests_grow_to_their_limit() -> None:
    rests = Rests(first_s=1.0, longest_s=10.0)

    assert [rests.begin("a") for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert rests.begin("b") == 1
    assert rests.still() == ["a", "b"]
    rests.keep_only(["b"])
    assert rests.still() == ["b"]
    assert rests.begin("a") == 1


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("where", ["opened", "unpacked"])
def test_a_machine_that_is_short_of_open_files_fails_no_job(
    light_ground: JobGround, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Another job may have them, for a while."""
    shortage = [OSError(errno.EMFILE, "Too many open files")]
    module, name = {"opened": (staging, "_draft"), "unpacked": (packing, "_write")}[where]
    real = getattr(module, name)

    def short(*args: Any, **options: Any) -> Any:
        if shortage:
            raise shortage.pop()
        return real(*args, **options)

    monkeypatch.setattr(module, name, short)
    job, keeper = light_ground.submit(), light_ground.keeper()
    for _ in range(4):
        keeper.tick()

    done = light_ground.jobs.show(job.id)
    assert (done.state, done.attempt, done.reason) == (JobState.DONE, 1, None)


# ------------------------------------------------------------------------------------------ clocks that jump


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_clock_that_jumps_while_a_job_pauses_does_not_hold_it_up(
    light_ground: JobGround, jump: timedelta
) -> None:
    outcomes = iter([FAILED, DONE])
    light_ground.launcher.program = lambda _: next(outcomes)
    job, keeper = light_ground.submit(retries=1), light_ground.keeper()
    keeper.tick()
    assert light_ground.jobs.show(job.id).state is JobState.QUEUED

    light_ground.platform.clock.advance(jump)
    for _ in range(2):
        keeper.tick()

    done = light_ground.jobs.show(job.id)
    assert (done.state, done.attempt) == (JobState.DONE, 2)
    assert light_ground.launcher.runs == {f"{job.id}/1": 1, f"{job.id}/2": 1}


def test_a_clock_that_is_put_back_a_little_lengthens_a_pause_by_no_more_than_the_longest(
    light_ground: JobGround,
) -> None:
    job = light_ground.submit(retries=1)
    light_ground.begin(job)
    light_ground.settle(job, "failed")
    clock = light_ground.platform.clock

    clock.advance(timedelta(seconds=-100))

    due = light_ground.jobs.explain(job.id).expected_start
    assert due is not None
    assert due - clock() <= timedelta(seconds=LONGEST_PAUSE_S)


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_clock_that_jumps_while_a_job_runs_loses_nothing(light_ground: JobGround, jump: timedelta) -> None:
    light_ground.launcher.program = lambda _: AttemptState("running")
    job, waiting = light_ground.submit(cpus=3, timeout="PT10M"), light_ground.submit(cpus=3)
    keeper = light_ground.keeper()
    keeper.tick()
    eventually(lambda: light_ground.launcher.runs)

    light_ground.platform.clock.advance(jump)
    keeper.tick()
    assert light_ground.jobs.show(waiting.id).state is JobState.QUEUED
    light_ground.launcher.known[f"{job.id}/1"] = DONE
    eventually(lambda: light_ground.jobs.show(job.id).state is JobState.DONE)
    keeper.tick()

    done = light_ground.jobs.show(job.id)
    assert done.started_at is not None
    assert done.ended_at is not None
    assert done.ended_at >= done.started_at
    hours = light_ground.platform.rows_of("SELECT cpu_hours FROM scheduling_usage WHERE ended_at IS NOT NULL")
    assert all(each >= 0 for each in hours)
    assert light_ground.jobs.show(waiting.id).state is JobState.RUNNING
    assert set(light_ground.launcher.runs.values()) == {1}
    keeper.stop()


# ------------------------------------------------------------------------------------------- long queues


@pytest.fixture
def decided(light_ground: JobGround, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many jobs waited at each decision."""
    seen: list[int] = []
    real = keeping.decide_from

    def decide(backlog: Backlog, snapshot: Snapshot) -> tuple[Decision, ...]:
        seen.append(len(backlog))
        return real(backlog, snapshot)

    monkeypatch.setattr(keeping, "decide_from", decide)
    light_ground.launcher.program = lambda _: AttemptState("running")
    return seen


def test_a_queue_in_which_nothing_happens_is_not_decided_about(
    light_ground: JobGround, decided: list[int]
) -> None:
    first, keeper = light_ground.submit(cpus=4), light_ground.keeper()
    keeper.tick()
    light_ground.submit(cpus=4)
    for _ in range(5):
        keeper.tick()
    after_submit = len(decided)

    for _ in range(5):
        keeper.tick()
    assert len(decided) == after_submit
    light_ground.submit(cpus=4)
    keeper.tick()
    assert decided[-1] == 2

    light_ground.launcher.known[f"{first.id}/1"] = DONE
    eventually(lambda: light_ground.jobs.show(first.id).state is JobState.DONE)
    keeper.tick()
    assert len(light_ground.jobs.list(state=JobState.RUNNING).items) == 1
    keeper.stop()


def test_more_machines_are_an_occasion_and_so_is_the_passing_of_time(
    light_ground: JobGround, decided: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    light_ground.submit(cpus=4)
    waiting, keeper = light_ground.submit(cpus=4), light_ground.keeper()
    for _ in range(3):
        keeper.tick()
    before = len(decided)

    monkeypatch.setattr(occasions, "RECONSIDER_S", 0.0)
    keeper.tick()
    assert len(decided) == before + 1
    light_ground.machine.node = NODE.model_copy(update={"cpus": 8})
    monkeypatch.setattr(occasions, "RECONSIDER_S", 3600.0)
    keeper.tick()

    assert light_ground.jobs.show(waiting.id).state is JobState.RUNNING
    keeper.stop()


def test_what_a_job_asks_for_is_parsed_once(light_ground: JobGround, monkeypatch: pytest.MonkeyPatch) -> None:
    job = light_ground.submit(cpus=2, queue="default", group="a")
    queue, platform = light_ground.jobs.queue, light_ground.platform

    def look() -> Any:
        with platform.database.read() as tx:
            (request,) = queue.look(tx, (NODE,), now=platform.clock()).snapshot.pending
        return request

    first = look()
    assert look() is first
    assert (first.job, first.each.cpus, first.group, first.workspace) == (job.id, 2, "a", job.workspace)
    platform.sql("UPDATE training_jobs SET claim = true")
    assert look().claim
    platform.sql("UPDATE training_jobs SET request = NULL")  # as in a home of an earlier version
    old = look()
    assert old == first.model_copy(update={"claim": True})
