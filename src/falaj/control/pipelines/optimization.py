"""The optimization workflow: a job makes and measures variants, then the accepted ones are registered as versions.

A student is trained before that by a job of its own; without one the others go on. Each step is one operation on
behalf of the requester. After a kill at any moment the next controller resumes it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from falaj.control.authorization import controller_caller
from falaj.control.pipelines.students import train_student, words_of_job
from falaj.control.services import Services
from falaj.control.workflows.context import WorkflowContext, to_json, wait_for_job
from falaj.errors import Conflict
from falaj.governance.operations.caller import acting_as
from falaj.optimization.settings import OptimizationSettings
from falaj.ports.workflows import JsonObject
from falaj.records.optimization import (
    AcceptanceBudget,
    OptimizationReport,
    OptimizationVerdict,
    Recipe,
    Variant,
)
from falaj.records.registry import FileFormat, ModelVersion
from falaj.records.training.jobs import Job, JobSpec, JobState

REPORT = "report.json"
LARGEST_REPORT = 4 << 20
PROGRAM = "falaj.optimization.runtime"
STUDENT_PROGRAM = "falaj.assembly.distillation"
STUDENT_RECIPE: Recipe = "distill"
EXPERIMENT = "optimization"
LONGEST = timedelta(minutes=30)
LONGEST_TRAINING = timedelta(hours=1)


def optimize(services: Services, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Measure variants of a version; the result names the new versions, the fastest last."""
    student: JsonObject = {}
    if STUDENT_RECIPE in given["recipes"]:
        student = train_student(
            services, context, _student_spec(services, given), workspace=given["workspace"]
        )
    submitted = context.run("submit", lambda: _submit(services, given, student))
    job = wait_for_job(
        services,
        context,
        "measure variants",
        submitted["id"],
        lambda: _ended(services, context, submitted["id"]),
    )
    report = context.run("read the report", lambda: _report(services, job))
    measured = OptimizationReport.model_validate(report)
    made: dict[str, JsonObject] = {}
    for variant in _accepted(measured):
        name = f"register {variant.recipe}"
        made[variant.recipe] = context.run(name, partial(_register, services, given, job, measured, variant))
    kept = context.run("record", lambda: _record(services, given, job, student, report, made))
    return {
        "id": kept["id"],
        "job": job["id"],
        "versions": [each["id"] for each in made.values()],
        "references": [each["reference"] for each in made.values()],
    }


def _submit(services: Services, given: JsonObject, student: JsonObject) -> JsonObject:
    inputs = {"model": given["model"], "data": given["data"]}
    if given.get("held_out") is not None:
        inputs["held_out"] = given["held_out"]
    if "blob" in student:
        inputs["student"] = student["blob"]
    settings = _settings(given).model_copy(update={"no_student": student.get("refused", "")})
    spec = _job_spec(services, given, "optimize", PROGRAM, settings).model_copy(
        update={"inputs": inputs, "gpus": given.get("gpus", 0)}
    )
    return to_json(services.jobs.submit(spec, workspace=given["workspace"]))


def _student_spec(services: Services, given: JsonObject) -> Callable[[], JobSpec]:
    """Return the job that trains the student; it is not given the held-out set."""

    def spec() -> JobSpec:
        made = _job_spec(services, given, "distill", STUDENT_PROGRAM, _settings(given))
        inputs = {"model": given["model"], "data": given["data"]}
        return made.model_copy(update={"inputs": inputs, "timeout": LONGEST_TRAINING})

    return spec


def _settings(given: JsonObject) -> OptimizationSettings:
    return OptimizationSettings(
        target=given["target"],
        features=tuple(given["features"]),
        recipes=tuple(given["recipes"]),
        budget=AcceptanceBudget.model_validate(given["budget"]),
        held_out=given.get("held_out") is not None,
    )


def _job_spec(
    services: Services, given: JsonObject, verb: str, program: str, settings: OptimizationSettings
) -> JobSpec:
    version = services.models.version(given["model"])
    return JobSpec(
        name=f"{verb}-{version.name}-{version.number}"[-128:].lstrip("-_."),
        module=program,
        args=settings.arguments(),
        queue=given.get("queue", "default"),
        environment=given.get("environment"),
        experiment=EXPERIMENT,
        timeout=LONGEST,
    )


def _ended(services: Services, context: WorkflowContext, ident: str) -> JsonObject | None:
    job = services.jobs.show(ident)
    if not job.state.ended:
        context.report(words_of_job(ident, "measures variants"))
        return None
    if job.state is not JobState.DONE:
        why = job.reason or f"exit status {job.exit_code}"
        raise Conflict(f"the job {job.id} {job.state}: {why}; see falaj jobs logs {job.id}")
    return to_json(job)


def _report(services: Services, job: JsonObject) -> JsonObject:
    blob = _outputs(job).get(REPORT)
    if blob is None:
        raise Conflict(f"the job {job['id']} left no {REPORT} behind")
    text = b"".join(services.blobs.read(blob, length=LARGEST_REPORT))
    try:
        return to_json(OptimizationReport.model_validate_json(text))
    except ValidationError as error:
        raise Conflict(
            f"{REPORT} of the job {job['id']} cannot be read: {error.error_count()} faults"
        ) from None


def _accepted(report: OptimizationReport) -> list[Variant]:
    """Return the variants that become versions, the fastest on a single row last."""
    chosen = [
        each
        for each in report.variants
        if each.verdict is OptimizationVerdict.ACCEPTED and each.measured is not None
    ]
    return sorted(chosen, key=lambda each: -each.measured.latency_p50_us if each.measured else 0.0)


def _register(
    services: Services, given: JsonObject, job: JsonObject, report: OptimizationReport, variant: Variant
) -> JsonObject:
    original = services.models.version(given["model"])
    inputs, outputs = _signature(original, variant)
    blob = _outputs(job).get(variant.file or "")
    if blob is None:
        raise Conflict(f"the job {job['id']} left no {variant.file} behind")
    made = services.models.register(
        original.name,
        files=(blob,),
        paths=(f"model{PurePosixPath(variant.file or '').suffix}",),
        workspace=original.workspace,
        training_set=original.training_set,
        run=job["run"],
        sources=(original.id,),
        inputs=inputs,
        outputs=outputs,
        metrics={**original.metrics, **_metrics(variant)},
        environment={**original.environment, **measured_where(report, variant)},
        card=f"The {variant.recipe} variant of {original.reference}: {variant.reason}.\n\n{original.card}"[
            :200_000
        ],
    )
    return {"id": made.id, "reference": made.reference}


def measured_where(report: OptimizationReport, variant: Variant) -> dict[str, str]:
    """Return what a version's environment says of the hardware that its variant was accepted on."""
    return {
        "optimization.recipe": variant.recipe,
        "optimization.device": report.gpu[:2000] if variant.device == "gpu" else "cpu",
        "optimization.host": report.host[:2000],
        "optimization.instruction_set": " ".join(report.instruction_set),
    }


def _signature(original: ModelVersion, variant: Variant) -> tuple[Any, Any]:
    """Return the signature of the original, whose tensors an ONNX variant keeps, else that of the variant."""
    if original.format is FileFormat.ONNX and original.inputs and original.outputs:
        return original.inputs, original.outputs
    return variant.inputs, variant.outputs


def _metrics(variant: Variant) -> dict[str, float]:
    measured = variant.measured.model_dump() if variant.measured is not None else {}
    return {f"optimization.{name}": float(value) for name, value in measured.items() if value is not None}


def _record(
    services: Services,
    given: JsonObject,
    job: JsonObject,
    student: JsonObject,
    reported: JsonObject,
    made: dict[str, JsonObject],
) -> JsonObject:
    """Store the report as the controller: a requester with that right could store made-up measurements."""
    report = OptimizationReport.model_validate(reported)
    variants = tuple(
        each.model_copy(update={"version": made[each.recipe]["reference"]}) if each.recipe in made else each
        for each in report.variants
    )
    with acting_as(controller_caller(services.optimization.gate.database)):
        kept = services.optimization.record(
            given["model"],
            data=given["data"],
            held_out=given.get("held_out"),
            job=job["id"],
            student=student.get("job"),
            target=given["target"],
            features=tuple(given["features"]),
            budget=AcceptanceBudget.model_validate(given["budget"]),
            report=report.model_copy(update={"variants": variants}),
        )
    return to_json(kept)


def _outputs(job: JsonObject) -> dict[str, str]:
    return {output.path: output.blob for output in Job.model_validate(job).outputs}
