"""The scheduling services with the real job service: usage is recorded in the same transaction."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from falaj.errors import Conflict, Denied, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.training.jobs import JobSpec
from job_harness import JobHarness, archive
from platforms import OwnPlatform


@pytest.fixture
def jobs(platform: OwnPlatform, tmp_path: Path) -> JobHarness:
    """A job service; the test runs on SQLite and on PostgreSQL."""
    return JobHarness(platform, tmp_path)


def test_resources_of_an_attempt_are_accounted_for(jobs: JobHarness) -> None:
    platform = jobs.platform
    job = jobs.submit(name="fitting", cpus=2)
    jobs.begin(job)
    began = platform.clock()
    held = platform.queues.show("default")

    platform.clock.advance(timedelta(hours=3))
    jobs.finish(job, "done")

    lasted = (platform.clock() - began) / timedelta(hours=1)
    (line,) = platform.usage.show(by="job", since=began).lines
    assert (held.held.cpus, held.running, held.waiting) == (2, 1, 0)
    assert (line.id, line.name, line.workspace) == (job.id, "fitting", "default")
    assert (line.attempts, line.running) == (1, 0)
    assert line.cpu_hours == pytest.approx(2 * lasted, abs=1e-9)
    (person,) = platform.usage.show(by="user", since=began).lines
    assert person.name == platform.users.whoami().principal.name


def test_a_queue_with_a_waiting_job_cannot_be_removed(jobs: JobHarness) -> None:
    jobs.platform.queues.set("night")
    jobs.submit(queue="night")

    with pytest.raises(Conflict, match="0 running and 1 waiting jobs"):
        jobs.platform.queues.remove("night")
    assert jobs.platform.queues.show("night").waiting == 1


def test_jobs_go_only_into_queues_that_are_open_to_them(jobs: JobHarness) -> None:
    platform = jobs.platform
    platform.workspaces.create("risk")
    platform.queues.set("risk", workspaces=("risk",))
    spec = JobSpec(name="fitting", script="train.py", queue="risk")
    code = platform.blobs.upload(iter([archive({"train.py": ""})]))

    with pytest.raises(Denied, match="workspace default may not submit into queue risk"):
        jobs.jobs.submit(spec, code=code.id)
    with pytest.raises(NotFound, match="queue 'nowhere' does not exist"):
        jobs.jobs.submit(spec.model_copy(update={"queue": "nowhere"}), code=code.id)


def test_a_developer_sees_the_queues_and_cannot_change_them(jobs: JobHarness) -> None:
    platform = jobs.platform
    caller = platform.join("dana", Role.DEVELOPER)

    with acting_as(caller):
        assert [each.name for each in platform.queues.list().items] == ["default"]
        with pytest.raises(Denied):
            platform.queues.set("default", weight=100)


def test_explanation_names_the_queue_that_a_job_waits_for(jobs: JobHarness) -> None:
    def changes() -> int:
        return sum(jobs.platform.rows_of("SELECT count FROM training_queue_changes"))

    before = changes()
    jobs.platform.queues.set("night")
    jobs.platform.queues.set_budget("default", gpu_hours=5)
    jobs.platform.queues.remove("night")

    assert changes() == before + 3
