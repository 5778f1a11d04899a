"""The job service: admission, the states of jobs, and who may do what."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from pydantic import ValidationError

from falaj.errors import (
    Conflict,
    Denied,
    FalajError,
    Fenced,
    InvalidInput,
    IsolationRefused,
    NotFound,
    ResidencyDenied,
)
from falaj.governance.operations.caller import Caller, acting_as, on_terms
from falaj.ports.launcher import AttemptState
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role
from falaj.records.tracking import MetricPoint
from falaj.records.training.jobs import Checkpoint, CodeOrigin, Job, JobOutput, JobSpec, JobState
from falaj.training.tables import attempts
from job_harness import GPU_NODE, JobHarness

# ------------------------------------------------------------------------------------------------ submitting


def test_a_submitted_job_waits_with_a_run_of_its_own(harness: JobHarness) -> None:
    harness.platform.put("flights.csv", b"a\n1\n")

    job = harness.submit(inputs={"flights": "flights.csv"}, args=["--lr", "1"])

    assert (job.state, job.attempt, job.name) == (JobState.QUEUED, 0, "fitting")
    run = harness.platform.runs.show(job.run)
    assert run.run.status == "running"
    assert {each.key: each.value for each in run.tags} == {"falaj.job": job.id}
    assert harness.jobs.show(job.id) == job
    assert harness.wanted == 1


def test_code_of_a_job_is_committed(harness: JobHarness) -> None:
    job = harness.submit()

    assert harness.platform.blobs.show(str(job.code)).committed


def test_inputs_flow_into_the_job_and_its_run(harness: JobHarness) -> None:
    blob = harness.platform.put("flights", b"rows", only=("AE",), classes=("personal",))

    job = harness.submit(inputs={"flights": blob.id})

    assert job.label.only == {"AE"}
    assert harness.platform.runs.show(job.run).run.label == job.label
    upstream = {node.id for node in harness.platform.lineage.graph(job.id, direction="up")}
    assert {blob.id, job.code} <= upstream


def test_inputs_forbidden_in_this_zone_are_refused_with_their_path(harness: JobHarness) -> None:
    harness.platform.put("berlin", b"rows", zone="frankfurt", only=("DE",))

    with pytest.raises(ResidencyDenied, match="allowed is DE") as refused:
        harness.submit(inputs={"rows": "berlin"})

    assert refused.value.details["path"] == ["blob:berlin"]


@pytest.mark.parametrize(
    ("spec", "where", "most"),
    [
        ({"gpus": 2}, "spec.gpus", "at most 1"),
        ({"cpus": 5}, "spec.cpus", "at most 4"),
        ({"memory_bytes": 9 << 30}, "spec.memory_bytes", "8 GiB"),
    ],
)
def test_requests_beyond_every_node_are_refused_with_figures(
    light_harness: JobHarness, spec: dict[str, int], where: str, most: str
) -> None:
    light_harness.machine.node = GPU_NODE

    with pytest.raises(InvalidInput) as refused:
        light_harness.submit(**spec)

    (fault,) = refused.value.faults
    assert fault.where == where
    assert most in (fault.allowed or "")


@pytest.mark.parametrize(
    "script", ["/etc/passwd", "../train.py", "a/../../b.py", "", "a//b.py", "./train.py"]
)
def test_a_script_outside_of_its_code_is_refused(script: str) -> None:
    with pytest.raises(ValidationError):
        JobSpec(name="x", script=script)


@pytest.mark.parametrize("spec", [{}, {"script": "a.py", "module": "falaj.x"}, {"module": "os.path"}])
def test_a_job_runs_one_thing(spec: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        JobSpec(name="x", **spec)  # type: ignore[arg-type]


def test_a_job_cannot_set_platform_variables() -> None:
    with pytest.raises(ValidationError, match="FALAJ_"):
        JobSpec(name="x", script="a.py", env={"FALAJ_AGENT": "x"})


def test_a_script_needs_code(light_harness: JobHarness) -> None:
    with pytest.raises(InvalidInput) as refused:
        light_harness.jobs.submit(JobSpec(name="x", script="train.py"))

    assert refused.value.faults[0].where == "code"


def test_unknown_inputs_are_named_all_at_once(light_harness: JobHarness) -> None:
    with pytest.raises(NotFound) as refused:
        light_harness.submit(inputs={"a": "nothing", "b": "blob:nowhere"})

    assert [fault.where for fault in refused.value.faults] == ["inputs.a", "inputs.b"]


def test_an_ambiguous_input_name_must_be_qualified(light_harness: JobHarness) -> None:
    platform = light_harness.platform
    platform.put("flown", b"rows")
    column = Feature(name="delay", type=ColumnType.FLOAT)
    view = FeatureView(name="flown", entities=("carrier",), columns=(column,))
    platform.features.apply(entities=(Entity(name="carrier", key="carrier"),), views=(view,))

    with pytest.raises(InvalidInput) as refused:
        light_harness.submit(inputs={"a": "flown"})

    assert "view:flown or blob:flown" in (refused.value.faults[0].allowed or "")
    assert light_harness.submit(inputs={"a": "blob:flown"}).state is JobState.QUEUED


def test_an_object_that_cannot_be_an_input_is_refused(light_harness: JobHarness) -> None:
    job = light_harness.submit()

    with pytest.raises(InvalidInput) as refused:
        light_harness.submit(inputs={"a": job.id})

    assert "a training set" in (refused.value.faults[0].allowed or "")


def test_an_input_must_be_readable_by_the_submitter(light_harness: JobHarness) -> None:
    platform = light_harness.platform
    platform.workspaces.create("secret")
    hidden = platform.put("hidden", b"rows", workspace="secret")
    worker = platform.join("worker", Role.DEVELOPER)

    with acting_as(worker), pytest.raises(NotFound):
        light_harness.submit(inputs={"a": hidden.id})


def test_a_token_without_the_scopes_of_the_job_is_refused_at_once(light_harness: JobHarness) -> None:
    owner = light_harness.platform.users.whoami().principal
    narrow = Caller(owner.id, owner.name, "user", "test", actions=("jobs.*", "blobs.*"))  # type: ignore[arg-type]

    with acting_as(narrow), pytest.raises(Denied, match=r"runs\.log_metrics"):
        light_harness.submit()


def test_a_home_of_several_users_without_a_sandbox_runs_no_jobs(light_harness: JobHarness) -> None:
    light_harness.machine.refuses = True
    light_harness.submit()
    light_harness.platform.users.create("second")

    with pytest.raises(IsolationRefused, match="2 users"):
        light_harness.submit()


def test_the_same_submission_sent_twice_is_one_job(light_harness: JobHarness) -> None:
    code = light_harness.platform.put("code", b"x")
    spec = JobSpec(name="x", script="train.py")
    made = []
    for _ in range(2):
        with on_terms(key="once"):
            made.append(light_harness.jobs.submit(spec, code=code.id).id)

    assert made[0] == made[1]


# ---------------------------------------------------------------------------------------------- states


def test_an_attempt_is_begun_once(harness: JobHarness) -> None:
    job = harness.submit()

    begun = harness.begin(job)

    assert (begun.state, begun.attempt, begun.node) == (JobState.RUNNING, 1, "here")
    for attempt in (1, 2):
        with pytest.raises(Conflict):
            harness.begin(job, attempt)


def test_only_the_controller_may_record_attempts(light_harness: JobHarness) -> None:
    job = light_harness.submit()
    worker = light_harness.platform.join("worker", Role.DEVELOPER)

    with acting_as(worker), pytest.raises(Denied):
        light_harness.jobs.finish(job.id, attempt=1, verdict="done")


def test_a_controller_that_lost_its_lease_writes_nothing(light_harness: JobHarness) -> None:
    job = light_harness.submit()
    earlier = light_harness.reconciler()
    light_harness.reconciler()

    with pytest.raises(Fenced):
        earlier.tick()

    assert light_harness.jobs.show(job.id).state is JobState.QUEUED


def test_outputs_are_published_when_the_job_ends(harness: JobHarness) -> None:
    job = harness.begin(harness.submit())
    made = [
        harness.platform.blobs.upload(iter([text]), sources=(job.id, job.run)) for text in (b"model", b"log")
    ]

    done = harness.finish(
        job, "done", exit_code=0, outputs=(JobOutput(path="model/m.bin", blob=made[0].id),), log=made[1].id
    )

    assert (done.state, done.exit_code, done.outputs[0].path) == (JobState.DONE, 0, "model/m.bin")
    run = harness.platform.runs.show(job.run)
    assert run.run.status == "finished"
    assert {each.path for each in run.artifacts} == {"model/m.bin", "log.txt"}
    assert all(harness.platform.blobs.show(each.id).committed for each in made)
    assert b"".join(harness.jobs.logs(job.id, offset=1)) == b"og"
    with pytest.raises(Conflict):
        harness.finish(job, "failed")


def test_a_failed_attempt_is_retried_with_backoff_up_to_a_limit(harness: JobHarness) -> None:
    job = harness.submit(retries=1)
    harness.begin(job)

    again = harness.finish(job, "failed", reason="ValueError: no", exit_code=1)

    assert (again.state, again.attempt) == (JobState.QUEUED, 1)
    assert "ValueError: no" in (again.reason or "")
    harness.begin(job, 2)
    last = harness.finish(job, "failed", attempt=2, reason="ValueError: no")
    assert (last.state, last.reason) == (JobState.FAILED, "ValueError: no")
    assert harness.platform.runs.show(job.run).run.status == "failed"
    assert [row["verdict"] for row in harness.platform.rows(attempts)] == ["failed", "failed"]


def test_an_interrupted_attempt_does_not_count(harness: JobHarness) -> None:
    job = harness.submit()
    for attempt in (1, 2, 3):
        harness.begin(job, attempt)
        back = harness.finish(job, "interrupted", attempt=attempt, reason="interrupted: the platform stopped")
        assert back.state is JobState.QUEUED

    assert back.reason == "interrupted: the platform stopped"


def test_a_queued_job_is_cancelled_at_once_and_a_running_one_is_stopped(harness: JobHarness) -> None:
    waiting, running = harness.submit(), harness.submit()
    harness.begin(running)

    gone, stopping = harness.jobs.cancel(waiting.id), harness.jobs.cancel(running.id)

    assert gone.state is JobState.CANCELLED
    assert harness.platform.runs.show(waiting.run).run.status == "killed"
    with pytest.raises(Conflict, match="has ended"):  # the run of a job is closed for good
        harness.platform.runs.log_metrics(waiting.run, (MetricPoint(key="loss", value=1.0),))
    with pytest.raises(Conflict, match="has ended"):
        harness.platform.runs.update(waiting.run, status="running")
    assert (stopping.state, stopping.cancelling) == (JobState.RUNNING, True)
    assert harness.finish(running, "failed").state is JobState.CANCELLED  # not tried again
    with pytest.raises(Conflict):
        harness.jobs.cancel(waiting.id)


def test_a_failed_job_is_retried_under_a_new_run(harness: JobHarness) -> None:
    job = harness.submit()
    with pytest.raises(Conflict):
        harness.jobs.retry(job.id)
    harness.begin(job)
    harness.finish(job, "failed", reason="no")

    again = harness.jobs.retry(job.id)

    assert (again.state, again.attempt, again.reason) == (JobState.QUEUED, 1, None)
    assert again.run != job.run
    assert harness.begin(job, 2).attempt == 2


def test_the_newest_checkpoints_stay_and_the_best(harness: JobHarness) -> None:
    job = harness.begin(harness.submit())
    saves = [save(harness, job, step, parts=2, keep=2, best=1) for step in range(5)]
    again = save(harness, job, 4, keep=2, best=1)

    kept = harness.jobs.checkpoints(job.id)

    assert [each.step for each in kept] == [4, 3, 1]
    assert kept == (again, saves[3], saves[1])
    for gone in (saves[4], saves[2], saves[0]):
        for part in (gone.manifest, *gone.parts):
            with pytest.raises(NotFound):
                harness.platform.blobs.show(part.blob)
    assert harness.platform.blobs.show(kept[1].parts[0].blob).committed


def test_the_same_save_twice_is_one(harness: JobHarness) -> None:
    job = harness.begin(harness.submit())
    first = save(harness, job, 3)

    with harness.as_controller():
        blobs = {"manifest": first.manifest.blob, "parts": (first.parts[0].blob,)}
        second = harness.jobs.save_checkpoint(job.id, attempt=1, step=3, save=first.save, **blobs)

    assert second == first
    assert harness.platform.blobs.show(first.parts[0].blob).committed


def test_a_late_save_of_an_earlier_attempt_replaces_nothing(harness: JobHarness) -> None:
    job = harness.begin(harness.submit())
    first = save(harness, job, 3)
    harness.finish(job, "interrupted")
    harness.begin(job, attempt=2)
    second = save(harness, job, 5, attempt=2)

    with pytest.raises(Conflict, match=r"attempt 1 of .* does not run"):
        save(harness, job, 4)

    assert harness.jobs.checkpoints(job.id) == (second, first)


def save(
    harness: JobHarness, job: Job, step: int, *, parts: int = 1, attempt: int = 1, **retention: int
) -> Checkpoint:
    manifest, *others = (
        harness.platform.blobs.upload(iter([bytes(each + 1)])).id for each in range(parts + 1)
    )
    with harness.as_controller():
        return harness.jobs.save_checkpoint(
            job.id,
            attempt=attempt,
            step=step,
            save=os.urandom(16).hex(),
            manifest=manifest,
            parts=tuple(others),
            **retention,
        )


# ------------------------------------------------------------------------------------------------ reading


def test_jobs_are_listed_newest_first_without_long_diffs(harness: JobHarness) -> None:
    origin = CodeOrigin(commit="0" * 40, diff="- a\n+ b")
    first, second = harness.submit(origin=origin), harness.submit()
    harness.jobs.cancel(second.id)

    assert [job.id for job in harness.jobs.list().items] == [second.id, first.id]
    (queued,) = harness.jobs.list(state=JobState.QUEUED).items
    assert (queued.id, queued.spec.origin) == (first.id, CodeOrigin(commit="0" * 40))
    assert harness.jobs.show(first.id).spec.origin == origin
    page = harness.jobs.list(limit=1)
    assert [job.id for job in harness.jobs.list(after=str(page.next)).items] == [first.id]


def test_a_waiting_job_is_explained(harness: JobHarness) -> None:
    running, waiting = harness.submit(cpus=4), harness.submit(cpus=2)
    harness.begin(running)

    found = harness.jobs.explain(waiting.id)

    assert (found.state, found.reason, found.position) == ("waiting", "capacity", 1)
    assert "2 CPUs" in found.words
    assert harness.jobs.explain(running.id).state == "running"


def test_a_backoff_is_explained_and_an_end_is_reported(light_harness: JobHarness) -> None:
    job = light_harness.submit(retries=1)
    light_harness.begin(job)
    light_harness.finish(job, "failed", reason="ValueError: no")

    found = light_harness.jobs.explain(job.id)

    assert "pauses until" in found.words
    assert found.expected_start is not None
    light_harness.jobs.cancel(job.id)
    with pytest.raises(Conflict, match="has ended: cancelled"):
        light_harness.jobs.explain(job.id)


def test_waiting_for_a_job_ends_with_it(light_harness: JobHarness) -> None:
    job = light_harness.submit()
    changes = light_harness.jobs.wait(job.id)
    assert next(changes).state is JobState.QUEUED

    light_harness.jobs.cancel(job.id)

    assert [change.state for change in changes][-1] is JobState.CANCELLED


def test_a_followed_log_goes_from_attempt_to_attempt(light_harness: JobHarness) -> None:
    job, launcher = light_harness.submit(retries=1), light_harness.launcher
    light_harness.begin(job)
    launcher.known[f"{job.id}/1"], launcher.output = AttemptState("running"), b"first"
    follow = light_harness.jobs.logs(job.id, follow=True)
    assert next(follow) == b"first"

    whole = light_harness.platform.blobs.upload(iter([b"first, to its end"]))
    light_harness.finish(job, "failed", log=whole.id)
    light_harness.begin(job, 2)
    launcher.known = {f"{job.id}/2": AttemptState("running")}
    launcher.output = b"second"

    assert [next(follow), next(follow)] == [b", to its end", b"second"]
    light_harness.finish(job, "failed", attempt=2)
    assert b"".join(follow) == b""


def test_a_job_of_another_workspace_is_unknown(light_harness: JobHarness) -> None:
    job = light_harness.submit()
    light_harness.platform.workspaces.create("elsewhere")
    stranger = light_harness.platform.join("stranger", Role.DEVELOPER, workspace="elsewhere")

    with acting_as(stranger):
        for look in (light_harness.jobs.show, light_harness.jobs.cancel, light_harness.jobs.logs):
            with pytest.raises(FalajError, match="there is no job"):
                look(job.id)


def test_pauses_grow(light_harness: JobHarness) -> None:
    job, pauses = light_harness.submit(retries=3), []
    for attempt in (1, 2, 3):
        light_harness.begin(job, attempt)
        light_harness.finish(job, "failed", attempt=attempt)
        due = light_harness.jobs.explain(job.id).expected_start
        assert due is not None
        pauses.append(due - light_harness.platform.clock())
        light_harness.platform.clock.advance(timedelta(minutes=1))

    assert pauses == [timedelta(seconds=1), timedelta(seconds=2), timedelta(seconds=4)]
