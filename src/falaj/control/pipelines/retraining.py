"""The retraining workflow: training set, job, model version, canary, then promotion or rollback.

Each step is one operation on behalf of the requester. After a kill at any moment the next controller resumes it.
"""

from __future__ import annotations

from functools import partial

from falaj.control.jobs.models import read_description, register_version
from falaj.control.pipelines.canary import canary
from falaj.control.services import Services
from falaj.control.workflows.context import WorkflowContext, to_json, wait_for_job
from falaj.errors import Conflict
from falaj.ports.workflows import JsonObject
from falaj.records.control.pipelines import Pipeline, PipelineOptimization
from falaj.records.control.predictions import PipelinePrediction
from falaj.records.control.workflows import WorkflowState
from falaj.records.training.jobs import Job, JobState


def retrain(services: Services, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Run a pipeline."""
    plan, workspace = Pipeline.model_validate(given["pipeline"]), given["workspace"]
    data = context.run("training set", lambda: _training_set(services, plan, workspace, context.workflow))
    submitted = context.run("submit", lambda: _submit(services, plan, given, data["id"]))
    job = wait_for_job(
        services, context, "train", submitted["id"], lambda: _ended_job(services, context, submitted["id"])
    )
    description = context.run(
        "read the model's description", lambda: read_description(services, Job.model_validate(job))
    )
    version = context.run(
        "register", lambda: _register(services, plan, workspace, description, job=job, data=data["id"])
    )
    if plan.optimizing is not None:
        version = _optimized(services, context, plan.optimizing, version, data["id"])
    tried = {
        "endpoint": f"{workspace}/{plan.endpoint}",
        "version": version["id"],
        "alias": plan.alias,
        "canary": plan.canary.model_dump(mode="json"),
        "approval_within": plan.approval_within.total_seconds(),
    }
    ended = canary(services, context, tried)
    if ended["verdict"]["promote"]:
        _set_references(services, context, plan, workspace, data["id"])
        if plan.predicting is not None:
            ended |= {"predictions": _predicted(services, context, plan.predicting, version["id"], workspace)}
    return {"training_set": data["id"], "job": job["id"], "cause": given["cause"]} | ended


# ------------------------------------------------------------------------------------------ training


def _training_set(services: Services, plan: Pipeline, workspace: str, workflow: str) -> JsonObject:
    """Build the training set in the zone of its spine: the default one need not be permitted."""
    return to_json(
        services.features.training_set(
            f"{plan.name}-{workflow[-8:]}",
            spine=f"{workspace}/view:{plan.spine}",
            views=tuple(f"{workspace}/{view}" for view in plan.views),
            last=plan.window,
            request_features=plan.request_features,
            workspace=workspace,
            zone=services.features.show(f"{workspace}/{plan.spine}").zone,
        )
    )


def _submit(services: Services, plan: Pipeline, given: JsonObject, data: str) -> JsonObject:
    spec = plan.job.model_copy(update={"inputs": {**plan.job.inputs, "training": data}})
    return to_json(services.jobs.submit(spec, code=given["code"], workspace=given["workspace"]))


def _ended_job(services: Services, context: WorkflowContext, ident: str) -> JsonObject | None:
    job = services.jobs.show(ident)
    if job.progress is not None:
        total = f" of {job.progress.total}" if job.progress.total else ""
        context.report(f"train: step {job.progress.step}{total}")
    if not job.state.ended:
        return None
    if job.state is not JobState.DONE:
        raise Conflict(f"the job {job.name} ({job.id}) {job.state}: {job.reason or 'no reason was given'}")
    return to_json(job)


def _register(
    services: Services, plan: Pipeline, workspace: str, description: JsonObject, *, job: JsonObject, data: str
) -> JsonObject:
    made = Job.model_validate(job)
    return to_json(
        register_version(services, made, description, plan.model, training_set=data, workspace=workspace)
    )


def _optimized(
    services: Services,
    context: WorkflowContext,
    settings: PipelineOptimization,
    version: JsonObject,
    data: str,
) -> JsonObject:
    """Return the accepted variant that was registered last, or the version itself if there is none."""

    def start() -> JsonObject:
        return to_json(
            services.optimization.start(
                version["id"],
                data=data,
                target=settings.target,
                features=settings.features,
                recipes=settings.recipes,
            )
        )

    def ended() -> JsonObject | None:
        found = services.workflows.show(work["id"])
        if not found.state.ended:
            return None
        if found.state is not WorkflowState.DONE:
            return {"versions": []}  # a failed optimization does not stop the pipeline
        return found.result or {"versions": []}

    work = context.run("optimize", start)
    made = context.wait("measure variants", ended)["versions"]
    return {"id": made[-1]} if made else version


def _predicted(
    services: Services,
    context: WorkflowContext,
    settings: PipelinePrediction,
    version: str,
    workspace: str,
) -> JsonObject:
    """Predict the rows of a view with the promoted version; an error stays in the result, as the promotion does."""

    def start() -> JsonObject:
        return to_json(
            services.predictions.start(
                version,
                data=f"{workspace}/view:{settings.view}",
                name=f"{settings.name}-{context.workflow[-8:]}",
                columns=settings.columns,
                into=None if settings.into is None else f"{workspace}/{settings.into}",
            )
        )

    def ended() -> JsonObject | None:
        found = services.workflows.show(work["id"])
        if not found.state.ended:
            return None
        return found.result if found.state is WorkflowState.DONE else {"error": found.error}

    work = context.run("predict", start)
    return context.wait("wait for the predictions", ended)


def _set_references(
    services: Services, context: WorkflowContext, plan: Pipeline, workspace: str, data: str
) -> None:
    """Make the new training set the reference of the endpoint's monitors."""

    def find_monitors() -> JsonObject:
        endpoint = services.endpoints.show(f"{workspace}/{plan.endpoint}").id
        found = services.monitoring.list(workspace=workspace, limit=1000).items
        return {"monitors": [each.id for each in found if each.endpoint == endpoint]}

    def set_reference(monitor: str) -> JsonObject:
        return to_json(services.monitoring.set_reference(monitor, reference=data))

    for monitor in context.run("look for monitors", find_monitors)["monitors"]:
        context.run(f"rebase {monitor}", partial(set_reference, monitor))
