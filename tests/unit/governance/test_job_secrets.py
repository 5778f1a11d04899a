"""Secrets in jobs: the submitter must be allowed to use them, at submission and whenever an attempt starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from falaj.control.jobs import reconciler as reconciling
from falaj.errors import Denied, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.ports.launcher import AttemptState, Launch
from falaj.records.governance.identity import Role
from falaj.records.training.jobs import JobState
from job_harness import DONE, FAILED, JobHarness
from platforms import OwnPlatform

FORBID = 'forbid (principal, action == Action::"secrets.use", resource);'
PIN = "4711-and-more"


@pytest.fixture
def harness(platform: OwnPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobHarness:
    """Attempts run in the reconciler's own thread; the test runs on SQLite and on PostgreSQL."""

    def at_once(target: Callable[[], None], **_: Any) -> threading.Thread:
        target()
        return threading.Thread()

    monkeypatch.setattr(reconciling, "start_thread", at_once)
    platform.secrets.set("db", PIN)
    return JobHarness(platform, tmp_path)


def given_to(harness: JobHarness, ends: AttemptState = DONE) -> list[Mapping[str, str]]:
    """Return the secrets that the attempts were launched with."""
    seen: list[Mapping[str, str]] = []

    def program(launch: Launch) -> AttemptState:
        assert PIN not in repr(launch)
        assert PIN not in str(dict(launch.environment))
        seen.append(dict(launch.secrets))
        return ends

    harness.launcher.program = program
    return seen


@pytest.mark.slow
def test_a_job_is_launched_with_its_secrets_and_its_record_has_only_the_reference(
    harness: JobHarness,
) -> None:
    seen = given_to(harness)
    job = harness.submit(secrets={"DB_PASSWORD": "secret:db"})

    harness.reconciler().tick()

    assert seen == [{"DB_PASSWORD": PIN}]
    assert harness.jobs.show(job.id).state is JobState.DONE
    assert harness.jobs.show(job.id).spec.secrets == {"DB_PASSWORD": "secret:db"}
    uses = [entry for entry in harness.platform.entries() if entry["action"] == "secrets.use"]
    assert [(entry["origin"], entry["outcome"]) for entry in uses] == [(f"job:{job.id}", "done")]


def test_a_job_with_unavailable_secrets_is_not_submitted(harness: JobHarness) -> None:
    with pytest.raises(NotFound) as missing:
        harness.submit(secrets={"A": "nothing", "B": "db", "C": "nowhere/db"})

    assert [fault.where for fault in missing.value.faults] == ["secrets.A", "secrets.C"]
    assert missing.value.faults[0].fix == "falaj secrets set nothing"
    assert harness.jobs.list().items == ()


def test_a_user_without_access_to_a_secret_cannot_give_it_to_a_job(harness: JobHarness) -> None:
    dana = harness.platform.join("dana", Role.DEVELOPER)
    harness.platform.policies.publish("none", text=FORBID, workspace="default")

    with acting_as(dana), pytest.raises(Denied, match="1 of the job's secrets cannot be used"):
        harness.submit(secrets={"A": "db"})


@pytest.mark.slow
def test_a_permission_lost_before_the_start_fails_the_job_with_a_reason(harness: JobHarness) -> None:
    seen = given_to(harness)
    dana = harness.platform.join("dana", Role.DEVELOPER)
    with acting_as(dana):
        job = harness.submit(secrets={"A": "db"})
    harness.platform.policies.publish("none", text=FORBID, workspace="default")

    harness.reconciler().tick()

    ended = harness.jobs.show(job.id)
    assert seen == []
    assert ended.state is JobState.FAILED
    assert "may not secrets.use" in (ended.reason or "")


def test_a_secret_missing_at_the_start_fails_the_job_with_a_reason(harness: JobHarness) -> None:
    job = harness.submit(secrets={"A": "db"})
    harness.platform.secrets.remove("db")

    harness.reconciler().tick()

    ended = harness.jobs.show(job.id)
    assert ended.state is JobState.FAILED
    assert "there is no secret 'db'" in (ended.reason or "")


@pytest.mark.slow
def test_a_new_value_is_given_to_the_next_attempt(harness: JobHarness) -> None:
    seen = given_to(harness, FAILED)
    job = harness.submit(secrets={"A": "db"})
    harness.reconciler().tick()
    harness.platform.secrets.set("db", "rotated")

    harness.jobs.retry(job.id)
    harness.reconciler().tick()

    assert seen == [{"A": PIN}, {"A": "rotated"}]


@pytest.mark.slow
def test_a_retry_checks_again_whether_the_secrets_may_be_used(harness: JobHarness) -> None:
    given_to(harness, FAILED)
    job = harness.submit(secrets={"A": "db"})
    harness.reconciler().tick()
    harness.platform.secrets.remove("db")

    with pytest.raises(NotFound):
        harness.jobs.retry(job.id)

    assert harness.jobs.show(job.id).state is JobState.FAILED
