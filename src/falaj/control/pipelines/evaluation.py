"""The workflow of an evaluation: for each version a job predicts a training set and computes its metrics.

Each step is one operation on behalf of the requester; what a job computed is recorded by the controller. After a kill
at any moment the next controller resumes it.
"""

from __future__ import annotations

from functools import partial

from pydantic import ValidationError

from falaj.control.authorization import controller_caller
from falaj.control.pipelines.prediction import job_arguments, wait_for_prediction
from falaj.control.services import Services
from falaj.control.workflows.context import WorkflowContext, to_json
from falaj.errors import Conflict
from falaj.governance.operations.caller import acting_as
from falaj.ports.workflows import JsonObject
from falaj.records.control.predictions import PredictionRun
from falaj.records.models.gates import EvaluationReport
from falaj.records.training.jobs import Job, JobSpec

PROGRAM = "falaj.assembly.evaluation"
OUTPUT = "metrics.json"
LARGEST_REPORT = 1 << 16
EXPERIMENT = "evaluation"
RETRIES = 2


def evaluate(services: Services, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Evaluate the versions one after the other; the result has the metrics of each."""
    found = []
    for version in sorted(given["runs"], key=lambda ident: given["runs"][ident]["model"]):
        run = PredictionRun.model_validate(given["runs"][version])
        submitted = context.run(f"submit {run.model}", partial(_submit, services, given, version, run))
        job = wait_for_prediction(services, context, f"evaluate {run.model}", submitted["id"])
        report = context.run(f"read the metrics of {run.model}", partial(_report, services, job, run))
        name = f"record the metrics of {run.model}"
        found.append(context.run(name, partial(_record, services, given, version, job, report)))
    return {"evaluations": found}


def _submit(services: Services, given: JsonObject, version: str, run: PredictionRun) -> JsonObject:
    spec = JobSpec(
        name=f"evaluate-{run.model.replace('@', '-')}"[-128:].lstrip("-_."),
        module=PROGRAM,
        args=job_arguments(run.model_copy(update={"threads": given["cpus"]})),
        inputs={
            "model": version,
            "data": given["data"],
            **{step.version: step.version for step in run.steps},
        },
        cpus=given["cpus"],
        retries=RETRIES,
        queue=given["queue"],
        experiment=EXPERIMENT,
    )
    return to_json(services.jobs.submit(spec, workspace=given["workspace"]))


def _report(services: Services, job: JsonObject, run: PredictionRun) -> JsonObject:
    outputs = {output.path: output.blob for output in Job.model_validate(job).outputs}
    if OUTPUT not in outputs:
        raise Conflict(f"the job {job['id']} left no {OUTPUT} behind")
    text = b"".join(services.blobs.read(outputs[OUTPUT], length=LARGEST_REPORT))
    try:
        report = EvaluationReport.model_validate_json(text)
    except ValidationError as error:
        raise Conflict(
            f"{OUTPUT} of the job {job['id']} cannot be read: {error.error_count()} faults"
        ) from None
    if report.target != run.target:
        raise Conflict(f"{OUTPUT} of the job {job['id']} is of another column than {run.target}")
    return to_json(report)


def _record(
    services: Services, given: JsonObject, version: str, job: JsonObject, report: JsonObject
) -> JsonObject:
    """Store the metrics as the controller: a requester with that right could store made-up ones."""
    with acting_as(controller_caller(services.models.gate.database)):
        made = services.models.record_evaluation(
            version, on=given["data"], job=job["id"], report=EvaluationReport.model_validate(report)
        )
    return to_json(made)
