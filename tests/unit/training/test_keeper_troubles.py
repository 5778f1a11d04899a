"""What keeps a keeper from its work: lost nodes, a database that refuses, clocks that jump, and very long queues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from falaj.control import jobs as keeping
from falaj.control import occasions
from falaj.control.resting import Rests
from falaj.errors import Conflict, InvalidInput
from falaj.ports.launcher import AttemptState
from falaj.records.scheduling import Decision, Snapshot
from falaj.records.training import JobState
from falaj.scheduling import Backlog
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


def test_rests_grow_to_their_limit() -> None:
    rests = Rests(first_s=1.0, longest_s=10.0)

    assert [rests.begin("a") for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert rests.begin("b") == 1
    assert rests.still() == ["a", "b"]
    rests.keep_only(["b"])
    assert rests.still() == ["b"]
    assert rests.begin("a") == 1


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
