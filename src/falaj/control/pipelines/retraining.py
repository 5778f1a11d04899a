"""Retraining as durable work: training set, job, version, canary, then promotion or the way back.

Each step is one operation, performed for whoever asked; killed at any moment, it goes on with the next controller.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from falaj.control.jobs.models import read_description, register_version
from falaj.control.pipelines.canary import analyses_reached, evaluate_canary
from falaj.control.services import Services
from falaj.control.workflows.context import WorkflowContext, wait_for_job
from falaj.errors import Conflict, FalajError
from falaj.ports.workflows import JsonObject
from falaj.records.control.pipelines import Canary, Pipeline, PipelineOptimization
from falaj.records.control.workflows import WorkflowState
from falaj.records.record import utc_now
from falaj.records.serving import EndpointStats, Route, VersionStats
from falaj.records.training.jobs import Job, JobState

Weights = dict[str, int]
"""Shares of requests by version."""


def retrain(services: Services, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Go through a pipeline."""
    plan, workspace = Pipeline.model_validate(given["pipeline"]), given["workspace"]
    data = context.run("training set", lambda: _training_set(services, plan, workspace, context.workflow))
    asked = context.run("submit", lambda: _submit(services, plan, given, data["id"]))
    job = wait_for_job(
        services, context, "train", asked["id"], lambda: _ended_job(services, context, asked["id"])
    )
    said = context.run(
        "read the model's description", lambda: read_description(services, Job.model_validate(job))
    )
    version = context.run(
        "register", lambda: _register(services, plan, workspace, said, job=job, data=data["id"])
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
        _rebase(services, context, plan, workspace, data["id"])
    return {"training_set": data["id"], "job": job["id"], "cause": given["cause"]} | ended


def canary(services: Services, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Try a version beside the one that serves, and promote it or go back."""
    endpoint, plan = given["endpoint"], Canary.model_validate(given["canary"])
    begun = context.run("look at the champion", lambda: _champion(services, endpoint, given["version"]))
    trial = _Trial(services, endpoint, begun, plan)
    try:
        split = context.run("begin the canary", trial.split)
        watching = _Watching(trial, context, datetime.fromisoformat(split["changed_at"]))
        verdict = context.wait("canary", watching.look, every_s=0.5)
        if verdict["promote"] and given["alias"]:
            verdict = _approved(trial, context, given, verdict)
        if verdict["promote"]:
            context.run("route all to it", trial.route_all)
            if given["alias"]:
                context.run("promote", lambda: _promote(services, begun["challenger"], given["alias"]))
    except FalajError as error:
        verdict = {"promote": False, "words": error.message}
    if not verdict["promote"]:
        context.undo("roll back", trial.roll_back)
    return {"version": begun["challenger"], "champion": begun["champion"], "verdict": verdict}


# ------------------------------------------------------------------------------------------ training


def _training_set(services: Services, plan: Pipeline, workspace: str, workflow: str) -> JsonObject:
    return to_json(
        services.features.training_set(
            f"{plan.name}-{workflow[-8:]}",
            spine=f"{workspace}/view:{plan.spine}",
            views=tuple(f"{workspace}/{view}" for view in plan.views),
            last=plan.window,
            workspace=workspace,
        )
    )


def _submit(services: Services, plan: Pipeline, given: JsonObject, data: str) -> JsonObject:
    spec = plan.job.model_copy(update={"inputs": {**plan.job.inputs, "training": data}})
    return to_json(services.jobs.submit(spec, code=given["code"], workspace=given["workspace"]))


def _ended_job(services: Services, context: WorkflowContext, ident: str) -> JsonObject | None:
    job = services.jobs.show(ident)
    if job.progress is not None:
        total = f" of {job.progress.total}" if job.progress.total else ""
        context.say(f"train: step {job.progress.step}{total}")
    if not job.state.ended:
        return None
    if job.state is not JobState.DONE:
        raise Conflict(f"the job {job.name} ({job.id}) {job.state}: {job.reason or 'no reason was given'}")
    return to_json(job)


def _register(
    services: Services, plan: Pipeline, workspace: str, said: JsonObject, *, job: JsonObject, data: str
) -> JsonObject:
    made = Job.model_validate(job)
    return to_json(register_version(services, made, said, plan.model, training_set=data, workspace=workspace))


def _optimized(
    services: Services, context: WorkflowContext, asked: PipelineOptimization, version: JsonObject, data: str
) -> JsonObject:
    """The accepted variant that is registered last, or the version itself if none was."""

    def start() -> JsonObject:
        return to_json(
            services.optimization.start(
                version["id"], data=data, target=asked.target, features=asked.features, recipes=asked.recipes
            )
        )

    def ended() -> JsonObject | None:
        found = services.workflows.show(work["id"])
        if not found.state.ended:
            return None
        if found.state is not WorkflowState.DONE:
            return {"versions": []}  # a variant that cannot be made is no reason to keep the old model
        return found.result or {"versions": []}

    work = context.run("optimize", start)
    made = context.wait("measure variants", ended)["versions"]
    return {"id": made[-1]} if made else version


def _rebase(services: Services, context: WorkflowContext, plan: Pipeline, workspace: str, data: str) -> None:
    """Compare the endpoint with what the new model was trained on, from now on."""

    def watching() -> JsonObject:
        endpoint = services.endpoints.show(f"{workspace}/{plan.endpoint}").id
        found = services.monitoring.list(workspace=workspace, limit=1000).items
        return {"monitors": [each.id for each in found if each.endpoint == endpoint]}

    def rebase(monitor: str) -> JsonObject:
        return to_json(services.monitoring.set_reference(monitor, reference=data))

    for monitor in context.run("look for monitors", watching)["monitors"]:
        context.run(f"rebase {monitor}", partial(rebase, monitor))


# -------------------------------------------------------------------------------------------- canary


def _champion(services: Services, endpoint: str, challenger: str) -> JsonObject:
    shown = services.endpoints.show(endpoint)
    version = services.models.version(challenger)
    serving = [route for route in shown.routes if route.weight]
    if len(serving) > 1:
        raise Conflict(
            f"{shown.name} divides its requests among versions {', '.join(route.version for route in serving)}: "
            "another canary is under way, or somebody did that; route all to one version first"
        )
    champion = serving[0].version
    if services.models.version(serving[0].id).model != version.model:
        raise Conflict(
            f"{version.reference} is not a version of the model {shown.model}, which {shown.name} serves"
        )
    if champion == str(version.number):
        raise Conflict(f"{version.reference} serves {shown.name} already")
    return {
        "champion": champion,
        "routes": {route.version: route.weight for route in shown.routes},
        "challenger": version.id,
        "challenger_version": str(version.number),
        "reference": version.reference,
    }


@dataclass(frozen=True)
class _Trial:
    """The endpoint of a canary, whose routes are changed only while they are what the canary takes them for."""

    services: Services
    endpoint: str
    begun: JsonObject
    plan: Canary

    @property
    def divided(self) -> Weights:
        tried = {
            self.begun["champion"]: 100 - self.plan.share,
            self.begun["challenger_version"]: self.plan.share,
        }
        return {**self.begun["routes"], **tried}

    @property
    def promoted(self) -> Weights:
        return {self.begun["challenger_version"]: 100}

    def split(self) -> JsonObject:
        self._require(self.begun["routes"], self.divided)
        return self._route(self.divided)

    def require_split(self) -> None:
        self._require(self.divided)

    def route_all(self) -> JsonObject:
        self._require(self.divided, self.promoted)
        return self._route(self.promoted)

    def roll_back(self) -> JsonObject:
        """Only what this canary did: routes that somebody else has set stay."""
        ours = self._weights() in (self.divided, self.promoted)
        return self._route(self.begun["routes"]) if ours else {}

    def _require(self, *weights: Weights) -> None:
        """The routes are one of these; a step that was interrupted finds what it did itself."""
        if self._weights() not in weights:
            raise Conflict(
                f"the routes of {self.endpoint} were changed by somebody else meanwhile; they stay so"
            )

    def _weights(self) -> Weights:
        return {route.version: route.weight for route in self.services.endpoints.show(self.endpoint).routes}

    def _route(self, weights: Weights) -> JsonObject:
        routes = tuple(Route(version=version, weight=weight) for version, weight in weights.items())
        return to_json(self.services.endpoints.route(self.endpoint, routes=routes))


class _Watching:
    """Looks at both versions until there is a verdict."""

    def __init__(self, trial: _Trial, context: WorkflowContext, since: datetime) -> None:
        self._trial = trial
        self._stats = partial(trial.services.endpoints.stats, trial.endpoint, since=since)
        self._say = context.say
        self._names = (trial.begun["champion"], trial.begun["challenger_version"])
        self._plan = trial.plan
        self._until = since + trial.plan.longest
        self._looked = 0

    def look(self) -> JsonObject | None:
        self._trial.require_split()
        stats, plan = self._stats(), self._plan
        champion, challenger = (_of(stats, name) for name in self._names)
        self._say(
            f"canary: {challenger.requests} of {plan.requests} requests, "
            f"{challenger.labelled} of {plan.labels} labels"
        )
        verdict = evaluate_canary(
            champion, challenger, plan, looked=self._looked, is_over=utc_now() > self._until
        )
        self._looked = analyses_reached(champion, challenger, plan)
        return None if verdict is None else to_json(verdict)


def _of(stats: EndpointStats, version: str) -> VersionStats:
    return next((each for each in stats.versions if each.version == version), VersionStats(version=version))


def _approved(trial: _Trial, context: WorkflowContext, given: JsonObject, verdict: JsonObject) -> JsonObject:
    """The verdict, once someone else has approved the version, where its alias asks for that."""
    services, begun = trial.services, trial.begun
    by = utc_now() + timedelta(seconds=given["approval_within"])

    def look() -> JsonObject | None:
        trial.require_split()
        if not _needs_approval(services, begun["challenger"], given["alias"]):
            return verdict
        if utc_now() > by:
            words = f"nobody approved {begun['reference']} for {given['alias']} in time"
            return {**verdict, "promote": False, "words": words}
        context.say(
            f"waits for approval: falaj models approve {begun['reference']} --alias {given['alias']}, by someone else"
        )
        return None

    return context.wait("approval", look)


def _needs_approval(services: Services, version: str, alias: str) -> bool:
    found = services.models.version(version)
    aliases = {each.alias: each for each in services.models.show(found.model).aliases}
    protected = alias in aliases and aliases[alias].protected
    return protected and not services.models.approvals(version, alias=alias).items


def _promote(services: Services, version: str, alias: str) -> JsonObject:
    aliases = {
        each.alias: each for each in services.models.show(services.models.version(version).model).aliases
    }
    if alias in aliases and aliases[alias].version == version:
        return {}
    return to_json(services.models.promote(version, to=alias))


def to_json(record: Any) -> JsonObject:
    dumped: JsonObject = record.model_dump(mode="json")
    return dumped
