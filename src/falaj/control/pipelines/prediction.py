"""The workflow of a batch prediction: a job predicts, its output is named, and perhaps added to a view.

Each step is one operation on behalf of the requester. After a kill at any moment the next controller resumes it.
"""

from __future__ import annotations

from falaj.control.services import Services
from falaj.control.workflows.context import WorkflowContext, to_json, wait_for_job
from falaj.errors import Conflict
from falaj.ports.workflows import JsonObject
from falaj.records.control.predictions import BatchPrediction, PredictionRun
from falaj.records.training.jobs import Job, JobSpec, JobState

PROGRAM = "falaj.assembly.prediction"
OUTPUT = "predictions.parquet"
EXPERIMENT = "prediction"
ARGUMENT_CHARACTERS = 4000
"""An argument of a job has at most 4096."""


def predict(services: Services, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Predict the rows of a table; the result names the blob of the predictions."""
    submitted = context.run("submit", lambda: _submit(services, given))
    job = wait_for_prediction(services, context, "predict", submitted["id"])
    context.report("store the predictions")
    staged = context.run("store the predictions", lambda: _stage(services, given, job))
    blob = context.run(
        "name the predictions",
        lambda: to_json(services.blobs.commit(staged["id"], name=given["name"])),
    )
    if given["into"] is not None:
        context.run(
            "add the predictions to the view",
            lambda: to_json(services.features.ingest(given["into"], data=blob["id"])),
        )
    made = BatchPrediction(blob=blob["id"], name=blob["name"], job=job["id"], view=given["into"])
    return to_json(made)


def _submit(services: Services, given: JsonObject) -> JsonObject:
    run = PredictionRun.model_validate(given["run"]).model_copy(update={"threads": given["cpus"]})
    spec = JobSpec(
        name=f"predict-{run.model.replace('@', '-')}"[-128:].lstrip("-_."),
        module=PROGRAM,
        args=job_arguments(run),
        inputs={
            "model": given["model"],
            "data": given["data"],
            **{step.version: step.version for step in run.steps},
        },
        cpus=given["cpus"],
        gpus=given["gpus"],
        retries=given["retries"],
        queue=given["queue"],
        experiment=EXPERIMENT,
    )
    return to_json(services.jobs.submit(spec, workspace=given["workspace"]))


def job_arguments(run: PredictionRun) -> tuple[str, ...]:
    """Return a run as the arguments of its job."""
    text = run.model_dump_json()
    return tuple(text[at : at + ARGUMENT_CHARACTERS] for at in range(0, len(text), ARGUMENT_CHARACTERS))


def wait_for_prediction(services: Services, context: WorkflowContext, name: str, job: str) -> JsonObject:
    """Wait in a step called `name` until a job that predicts is done; report how many rows it has predicted."""
    return wait_for_job(services, context, name, job, lambda: _ended(services, context, name, job))


def _ended(services: Services, context: WorkflowContext, name: str, ident: str) -> JsonObject | None:
    job = services.jobs.show(ident)
    if job.progress is not None:
        context.report(name, done=job.progress.step, of=job.progress.total)
    if not job.state.ended:
        return None
    if job.state is not JobState.DONE:
        why = job.reason or f"exit status {job.exit_code}"
        raise Conflict(f"the job {job.id} {job.state}: {why}; see falaj jobs logs {job.id}")
    return to_json(job)


def _stage(services: Services, given: JsonObject, job: JsonObject) -> JsonObject:
    """Copy the output of the job, which is an artifact of its run: the predictions come from the model and the rows."""
    outputs = {output.path: output.blob for output in Job.model_validate(job).outputs}
    if OUTPUT not in outputs:
        raise Conflict(f"the job {job['id']} left no {OUTPUT} behind")
    made = outputs[OUTPUT]
    staged = services.blobs.upload(
        services.blobs.read(made),
        workspace=given["workspace"],
        zone=services.blobs.show(made).zone,
        sources=(made, given["model"], given["data"]),
    )
    return to_json(staged)
