"""`queues.what_if` replays last week's jobs from the accounts under other settings."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from accounting_history import replay_now
from falaj.control.workflows.store import work_row
from falaj.errors import Denied, Internal, InvalidInput, NotFound, Unavailable
from falaj.governance.operations.caller import acting_as
from falaj.records.control.workflows import WorkflowState
from falaj.records.governance.identity import Role
from falaj.records.scheduling.accounting import PastAttempt
from falaj.records.scheduling.simulation import (
    Changes,
    MoreNodes,
    NewWeight,
    ResourceBound,
    WhatIfComparison,
    WhatIfQuestion,
)
from falaj.records.scheduling.snapshot import Quota
from falaj.scheduling import store
from falaj.scheduling.accounting import attempts
from falaj.scheduling.simulator import history as past_module
from falaj.scheduling.simulator import replay_process, what_if
from falaj.scheduling.simulator.history import past_jobs
from falaj.scheduling.tables import comparisons
from polling import PATIENCE_S, eventually

if TYPE_CHECKING:
    from conftest import SchedulingServices

HOUR = timedelta(hours=1)


def last_week(services: SchedulingServices) -> None:
    """Record a week in which team risk, with one GPU, submitted three jobs of an hour at once."""
    services.queues.set("risk", quota=Quota(gpus=1))
    services.queues.set("research", quota=Quota(gpus=2))
    waiting = [services.submit(queue="risk", gpus=1) for _ in range(3)]
    for request in waiting:
        services.begin(request)
        services.clock.advance(HOUR)
        services.end(request)


def compare(services: SchedulingServices, **settings: Any) -> WhatIfComparison:
    """Return the result, once the controller has run the replay."""
    work = services.queues.what_if(**settings)
    replay_now(services.queues, work.id)
    return services.queues.what_if_result(work.id)


def more_for_risk(gpus: int) -> Changes:
    return Changes(quotas=(ResourceBound(queue="risk", resource="gpus", amount=gpus),))


def test_more_quota_shortens_the_waits_of_the_team(services: SchedulingServices) -> None:
    last_week(services)

    found = compare(services, changes=more_for_risk(3))

    (risk,) = found.teams
    assert (risk.queue, found.jobs, found.changes) == ("risk", 3, ("quota of risk: 1 GPU → 3 GPUs",))
    assert (risk.before.wait.mean, risk.after.wait.mean) == (HOUR, timedelta(0))
    assert risk.before.gpu_hours == risk.after.gpu_hours == pytest.approx(3)
    assert risk.before.cost == risk.after.cost == pytest.approx(3 * (12.5 + 0.5))
    assert risk.before.gpu_use == pytest.approx(1 / 8)
    assert risk.after.gpu_use == pytest.approx(3 / 8)


def test_the_replay_without_changes_is_compared_with_history(services: SchedulingServices) -> None:
    last_week(services)

    found = compare(services)

    assert found.observed is not None
    assert found.observed.wait == found.observed.simulated_wait
    assert found.before == found.after


def test_an_attempt_that_was_preempted_counts_to_the_same_job(light_services: SchedulingServices) -> None:
    request = light_services.submit(gpus=1)
    light_services.begin(request)
    light_services.clock.advance(HOUR)
    light_services.end(request, verdict="preempted")
    light_services.begin(request, attempt=2)
    light_services.clock.advance(2 * HOUR)
    light_services.end(request, attempt=2)

    found = compare(light_services)

    assert (found.jobs, found.before.gpu_hours) == (1, pytest.approx(3))
    assert found.observed is not None
    assert (found.observed.preemptions, found.observed.simulated_preemptions) == (1, 0)


def test_only_jobs_that_were_submitted_in_the_time_are_replayed(light_services: SchedulingServices) -> None:
    last_week(light_services)
    light_services.clock.advance(timedelta(days=8))

    with pytest.raises(NotFound, match="no job submitted"):
        light_services.queues.what_if()
    found = compare(light_services, since=light_services.clock() - timedelta(days=9))

    assert found.jobs == 3


def test_wrong_references_and_times_are_refused_even_before_there_are_jobs(
    light_services: SchedulingServices,
) -> None:
    wrong = Changes(weights=(NewWeight(queue="nobody", weight=2),), add_nodes=(MoreNodes(like="there"),))

    with pytest.raises(InvalidInput) as refused:
        light_services.queues.what_if(changes=wrong)
    with pytest.raises(InvalidInput, match="before"):
        light_services.queues.what_if(since=light_services.clock() + HOUR)

    assert [fault.given for fault in refused.value.faults] == ["nobody", "there"]
    assert refused.value.faults[1].allowed == "a node: here"


def test_a_quota_that_the_service_would_refuse_is_refused(light_services: SchedulingServices) -> None:
    light_services.queues.set("bank", quota=Quota(gpus=2))
    light_services.queues.set("risk", quota=Quota(gpus=1), parent="bank")

    with pytest.raises(InvalidInput, match=r"risk: quota\.gpus"):
        light_services.queues.what_if(changes=more_for_risk(3))


# -------------------------------------------------------------------------------------- as a workflow


def test_the_result_is_stored_and_equals_the_simulators(services: SchedulingServices) -> None:
    last_week(services)
    changes = more_for_risk(2)

    work = services.queues.what_if(changes=changes, checkpoint_every=HOUR)
    with pytest.raises(NotFound, match=f"work {work.id} has no comparison"):
        services.queues.what_if_result(work.id)
    walk = replay_now(services.queues, work.id)

    assert (work.workflow, work.state) == ("queues.what_if", WorkflowState.WAITING)
    with services.platform.database.read() as tx:
        question = WhatIfQuestion.model_validate(work_row(tx, work.id).input)
    jobs = past_jobs(
        services.queues.history(since=question.since, until=question.until), now=question.asked_at
    )
    direct = what_if(jobs, question.world, changes, since=question.since, until=question.until)
    found = services.queues.what_if_result(work.id)
    assert question.world.assume.checkpoint_every == HOUR
    assert found == direct.model_copy(update={"words": (*direct.words, past_module.NOT_REPLAYED)})
    assert walk.reports[-1] == ("store the comparison", 6, 6)


@pytest.mark.slow
def test_changes_after_the_request_do_not_change_the_result(services: SchedulingServices) -> None:
    last_week(services)
    running = services.submit(queue="research", gpus=1)
    services.begin(running)
    services.clock.advance(HOUR)
    first, second = (services.queues.what_if(changes=more_for_risk(3)) for _ in range(2))
    replay_now(services.queues, first.id)

    services.clock.advance(HOUR)
    services.end(running, verdict="preempted")
    services.begin(running, attempt=2)
    services.queues.set("risk", quota=Quota(gpus=7))
    replay_now(services.queues, second.id)
    replay_now(services.queues, first.id)  # interrupted before the engine recorded it, and run again

    found = services.queues.what_if_result(first.id)
    assert found == services.queues.what_if_result(second.id)
    assert found.before.gpu_hours == pytest.approx(4)


def test_too_many_jobs_are_refused_at_the_request(
    light_services: SchedulingServices, monkeypatch: Any
) -> None:
    last_week(light_services)
    monkeypatch.setattr(past_module, "MOST_JOBS", 2)

    with pytest.raises(InvalidInput, match="3 jobs") as refused:
        light_services.queues.what_if()

    assert refused.value.faults[0].allowed == "a time range in which at most 2 jobs were submitted"


@pytest.mark.slow
def test_the_result_is_stored_encrypted(services: SchedulingServices) -> None:
    last_week(services)
    compare(services)

    (row,) = services.platform.rows(comparisons)

    assert b"risk" not in bytes(row["sealed"])
    with services.platform.database.read() as tx:
        assert "teams" not in (work_row(tx, row["work"]).result or {})


@pytest.mark.parametrize("where", ["default", "platform"])
def test_only_operators_may_replay(light_services: SchedulingServices, where: str) -> None:
    """A viewer of the platform sees that it was requested, but not its result."""
    last_week(light_services)
    work = light_services.queues.what_if()
    replay_now(light_services.queues, work.id)
    found = light_services.queues.what_if_result(work.id)
    role = Role.OPERATOR if where == "default" else Role.DEVELOPER
    until = light_services.clock()

    with light_services.acting("dana", role, workspace=where):
        with pytest.raises((Denied, NotFound)):
            light_services.queues.what_if()
        with pytest.raises((Denied, NotFound)):
            light_services.queues.what_if_result(work.id)
        with pytest.raises((Denied, NotFound)):
            light_services.queues.save_what_if(work.id, comparison=found)
        with pytest.raises((Denied, NotFound)):
            list(light_services.queues.history(since=until - HOUR, until=until))


@pytest.mark.slow
def test_an_operator_of_the_platform_may_replay(light_services: SchedulingServices) -> None:
    last_week(light_services)
    omar = light_services.join("omar", Role.OPERATOR, workspace="platform")

    with acting_as(omar):
        found = compare(light_services)
        work = light_services.queues.what_if()
        light_services.platform.workflows.cancel(work.id)
        seen = light_services.platform.workflows.show(work.id)

    assert (found.jobs, seen.id) == (3, work.id)


@pytest.mark.slow
def test_a_short_database_outage_is_waited_for(
    light_services: SchedulingServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_week(light_services)
    work = light_services.queues.what_if()
    fails = {"reading": 2, "keeping": 2}

    def away(what: str, real: Any) -> Any:
        def attempt(*given: Any, **named: Any) -> Any:
            fails[what] -= 1
            if fails[what] >= 0:
                raise Unavailable("the metadata database does not answer")
            return real(*given, **named)

        return attempt

    monkeypatch.setattr(attempts, "_past_attempt", away("reading", attempts._past_attempt))
    monkeypatch.setattr(store, "put_comparison", away("keeping", store.put_comparison))
    replay_now(light_services.queues, work.id)

    assert light_services.queues.what_if_result(work.id).jobs == 3
    assert max(fails.values()) < 0


def test_a_user_who_lost_the_role_gets_no_result(light_services: SchedulingServices) -> None:
    last_week(light_services)
    omar = light_services.join("omar", Role.OPERATOR, workspace="platform")
    with acting_as(omar):
        work = light_services.queues.what_if()
    light_services.platform.workspaces.revoke("platform", "omar", role=Role.OPERATOR)

    with acting_as(omar), pytest.raises((Denied, NotFound)):
        replay_now(light_services.queues, work.id)


@pytest.mark.parametrize(
    ("program", "words"),
    [("falaj.version", "exited with status 0"), ("falaj.no_such_module", "exited with status 1")],
)
def test_a_replay_process_without_a_result_is_an_error(
    light_services: SchedulingServices, monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    last_week(light_services)
    work = light_services.queues.what_if()
    monkeypatch.setattr(replay_process, "PROGRAM", program)

    with pytest.raises(Internal, match=words):
        replay_now(light_services.queues, work.id)


def test_a_killed_replay_process_is_reported_as_killed(light_services: SchedulingServices) -> None:
    last_week(light_services)
    work = light_services.queues.what_if()
    with light_services.platform.database.read() as tx:
        question = WhatIfQuestion.model_validate(work_row(tx, work.id).input)
    killed = threading.Event()

    def past() -> Iterator[PastAttempt]:
        killed.wait(PATIENCE_S)
        yield from light_services.queues.history(since=question.since, until=question.until)

    running = replay_process.ReplayProcess(question, past())
    os.kill(running.pid, signal.SIGKILL)
    killed.set()

    with pytest.raises(Internal, match="SIGKILL; it may have run out of memory"):
        eventually(running.look)
    running.stop()
    running.stop()
