"""The training of a student within an optimization: a job of its own, whose failure is a reason and not an error.

After a kill at any moment the next controller resumes the steps, and the job goes on from its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from pydantic import ValidationError

from falaj.control.services import Services
from falaj.control.workflows.context import WorkflowContext, to_json, wait_for_job
from falaj.errors import Conflict, Denied, InvalidInput
from falaj.ports.workflows import JsonObject
from falaj.records.optimization import StudentReport
from falaj.records.scheduling.snapshot import Reason
from falaj.records.training.jobs import Job, JobSpec, JobState

REPORT, STUDENT = "student.json", "student.onnx"
LARGEST_REPORT = 1 << 20
LONGEST_REASON = 1000


def train_student(
    services: Services, context: WorkflowContext, spec: Callable[[], JobSpec], *, workspace: str
) -> JsonObject:
    """Train a student by the job of `spec`; return its `job` and `blob`, or why it is `refused`."""
    submitted = context.run("submit the student", lambda: _submit(services, spec(), workspace))
    if "refused" in submitted:
        return submitted
    ident = submitted["id"]
    ended = wait_for_job(
        services, context, "train the student", ident, lambda: _ended(services, context, ident)
    )
    if "refused" in ended:
        return {"job": ident, "refused": ended["refused"]}
    return context.run("take the student", lambda: {"job": ident, **_taken(services, ended)})


def words_of_job(job: str, what: str) -> str:
    """Return what the workflow reports while a job runs; the command line reads the job's id from it."""
    return f"job {job} {what}"


def _submit(services: Services, spec: JobSpec, workspace: str) -> JsonObject:
    """Submit the job. A submission that the platform refuses, such as for a full queue, is an answer."""
    try:
        return to_json(services.jobs.submit(spec, workspace=workspace))
    except (Conflict, Denied, InvalidInput) as error:
        return _refused(f"the job was not accepted: {'; '.join(str(error).splitlines())}")


def _ended(services: Services, context: WorkflowContext, ident: str) -> JsonObject | None:
    job = services.jobs.show(ident)
    if not job.state.ended:
        context.report(words_of_job(ident, "trains a student"))
        return _without_budget(services, job)
    if job.state is not JobState.DONE:
        why = job.reason or f"exit status {job.exit_code}"
        return _refused(f"the job {job.id} {job.state}: {why}; see falaj jobs logs {job.id}")
    return to_json(job)


def _without_budget(services: Services, job: Job) -> JsonObject | None:
    """Cancel a job for which the workspace's budget has nothing left; the other variants cost less."""
    if job.state is not JobState.QUEUED:
        return None
    with suppress(Conflict):  # it has ended meanwhile
        found = services.jobs.explain(job.id)
        if found.reason is Reason.BUDGET:
            services.jobs.cancel(job.id)
            return _refused(f"the job {job.id} was cancelled, as it could not start: {found.words}")
    return None


def _taken(services: Services, ended: JsonObject) -> JsonObject:
    job = Job.model_validate(ended)
    outputs = {output.path: output.blob for output in job.outputs}
    if REPORT not in outputs:
        return _refused(f"the job {job.id} left no {REPORT} behind")
    text = b"".join(services.blobs.read(outputs[REPORT], length=LARGEST_REPORT))
    try:
        report = StudentReport.model_validate_json(text)
    except ValidationError as error:
        return _refused(f"{REPORT} of the job {job.id} cannot be read: {error.error_count()} faults")
    if report.refused:
        return {"refused": report.refused[:LONGEST_REASON]}
    if STUDENT not in outputs:
        return _refused(f"the job {job.id} left no {STUDENT} behind")
    return {"blob": outputs[STUDENT]}


def _refused(why: str) -> JsonObject:
    return {"refused": f"distillation: no student: {why}"[:LONGEST_REASON]}
