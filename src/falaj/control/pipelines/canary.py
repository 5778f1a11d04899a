"""The canary workflow, and its verdict as a pure function of the statistics of both versions.

A canary serves a challenger beside the champion, then promotes it or rolls back. Scores are analysed three times at
most: when there are `labels` labels of each version, twice and four times as many. Each analysis uses a third of the
risk (Bonferroni), so that three of them keep within the stated risk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from falaj.control.services import Services
from falaj.control.workflows.context import WorkflowContext, to_json
from falaj.errors import Conflict, FalajError
from falaj.ports.workflows import JsonObject
from falaj.records.control.pipelines import Canary, CanaryVerdict
from falaj.records.record import utc_now
from falaj.records.serving import EndpointStats, Route, VersionStats

Weights = dict[str, int]
"""Shares of requests by version."""

ANALYSES = 3
BOUND = 2.128
"""Standard errors: one-sided, 5 % in all, a third of it for each analysis."""


def canary(services: Services, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Serve a version beside the champion, then promote it or roll back."""
    endpoint, plan = given["endpoint"], Canary.model_validate(given["canary"])
    begun = context.run("look at the champion", lambda: _champion(services, endpoint, given["version"]))
    trial = _Trial(services, endpoint, begun, plan)
    try:
        split = context.run("begin the canary", trial.split)
        observation = _Observation(trial, context, datetime.fromisoformat(split["changed_at"]))
        verdict = context.wait("canary", observation.poll, every_s=0.5)
        if verdict["promote"] and given["alias"]:
            verdict = _wait_for_approval(trial, context, given, verdict)
        if verdict["promote"]:
            context.run("route all to it", trial.route_all)
            if given["alias"]:
                context.run("promote", lambda: _promote(services, begun["challenger"], given["alias"]))
    except FalajError as error:
        verdict = {"promote": False, "words": error.message}
    if not verdict["promote"]:
        context.undo("roll back", trial.roll_back)
    return {"version": begun["challenger"], "champion": begun["champion"], "verdict": verdict}


def _champion(services: Services, endpoint: str, challenger: str) -> JsonObject:
    shown = services.endpoints.show(endpoint)
    version = services.models.version(challenger)
    serving = [route for route in shown.routes if route.weight]
    if len(serving) > 1:
        raise Conflict(
            f"{shown.name} divides its requests among versions {', '.join(route.version for route in serving)}: "
            "another canary is under way, or someone split them; route all to one version first"
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
    """The endpoint of a canary. Its routes are changed only while they are those that the canary expects."""

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
        """Restore the routes from before the canary, unless someone else has changed them."""
        ours = self._weights() in (self.divided, self.promoted)
        return self._route(self.begun["routes"]) if ours else {}

    def _require(self, *weights: Weights) -> None:
        """Raise Conflict unless the routes are one of `weights`; a repeated step finds its own."""
        if self._weights() not in weights:
            raise Conflict(
                f"the routes of {self.endpoint} were changed by someone else; they are left as they are"
            )

    def _weights(self) -> Weights:
        return {route.version: route.weight for route in self.services.endpoints.show(self.endpoint).routes}

    def _route(self, weights: Weights) -> JsonObject:
        routes = tuple(Route(version=version, weight=weight) for version, weight in weights.items())
        return to_json(self.services.endpoints.route(self.endpoint, routes=routes))


class _Observation:
    """Compares both versions until there is a verdict."""

    def __init__(self, trial: _Trial, context: WorkflowContext, since: datetime) -> None:
        self._trial = trial
        self._stats = partial(trial.services.endpoints.stats, trial.endpoint, since=since)
        self._report = context.report
        self._names = (trial.begun["champion"], trial.begun["challenger_version"])
        self._plan = trial.plan
        self._until = since + trial.plan.longest
        self._analysed = 0

    def poll(self) -> JsonObject | None:
        """Return the verdict, or None while more requests or labels are needed."""
        self._trial.require_split()
        stats, plan = self._stats(), self._plan
        champion, challenger = (_of(stats, name) for name in self._names)
        self._report(
            f"canary: {challenger.requests} of {plan.requests} requests, "
            f"{challenger.labelled} of {plan.labels} labels"
        )
        verdict = evaluate_canary(
            champion, challenger, plan, analysed=self._analysed, is_over=utc_now() > self._until
        )
        self._analysed = analyses_reached(champion, challenger, plan)
        return None if verdict is None else to_json(verdict)


def _of(stats: EndpointStats, version: str) -> VersionStats:
    return next((each for each in stats.versions if each.version == version), VersionStats(version=version))


def _wait_for_approval(
    trial: _Trial, context: WorkflowContext, given: JsonObject, verdict: JsonObject
) -> JsonObject:
    """Return the verdict once the version is approved by someone else, where its alias requires approval."""
    services, begun = trial.services, trial.begun
    by = utc_now() + timedelta(seconds=given["approval_within"])

    def poll() -> JsonObject | None:
        trial.require_split()
        if not _needs_approval(services, begun["challenger"], given["alias"]):
            return verdict
        if utc_now() > by:
            words = f"nobody approved {begun['reference']} for {given['alias']} in time"
            return {**verdict, "promote": False, "words": words}
        context.report(
            f"waits for approval: falaj models approve {begun['reference']} --alias {given['alias']}, by someone else"
        )
        return None

    return context.wait("approval", poll)


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


# -------------------------------------------------------------------------------------------- verdict


@dataclass(frozen=True)
class ScoreDifference:
    """The difference of the challenger's mean score to the champion's (positive is worse), and its uncertainty."""

    worse_by: float
    uncertainty: float
    allowed: float


def evaluate_canary(
    champion: VersionStats,
    challenger: VersionStats,
    plan: Canary,
    *,
    analysed: int = 0,
    is_over: bool = False,
) -> CanaryVerdict | None:
    """Return the verdict, or None while more data is needed. `analysed` analyses of the scores were undecided."""
    allowed = _error_rate(champion) + plan.error_rate
    if challenger.errors > allowed * max(plan.requests, challenger.requests):
        words = f"{challenger.errors} of {challenger.requests} requests failed; {allowed:.1%} may"
        return CanaryVerdict(promote=False, words=words, champion=champion, challenger=challenger)
    if not _is_due(champion, challenger, plan, analysed=analysed):
        return _undecided(champion, challenger, plan) if is_over else None
    if plan.labels == 0:
        words = (
            f"its error rate is {_error_rate(challenger):.1%}, {allowed:.1%} may fail; no score is required"
        )
        return CanaryVerdict(promote=True, words=words, champion=champion, challenger=challenger)
    scores = compare(champion, challenger, plan)
    if scores.worse_by + scores.uncertainty <= scores.allowed:
        return _scored(champion, challenger, scores, promote=True, words="it is not worse")
    if scores.worse_by - scores.uncertainty > 0:
        return _scored(champion, challenger, scores, promote=False, words="it is worse")
    if analyses_reached(champion, challenger, plan) >= ANALYSES or is_over:
        return _scored(
            champion, challenger, scores, promote=False, words="it could not be shown to be as good"
        )
    return None


def compare(champion: VersionStats, challenger: VersionStats, plan: Canary) -> ScoreDifference:
    """Return the difference of the mean scores; a lower score is better."""
    old, new = champion.score_mean or 0.0, challenger.score_mean or 0.0
    error = math.sqrt(_error_of_mean(champion) + _error_of_mean(challenger))
    return ScoreDifference(worse_by=new - old, uncertainty=BOUND * error, allowed=plan.tolerance * abs(old))


def analyses_reached(champion: VersionStats, challenger: VersionStats, plan: Canary) -> int:
    """Return how many analyses the number of labels allows."""
    labels = min(champion.labelled, challenger.labelled)
    return 0 if plan.labels == 0 else sum(labels >= plan.labels * 2**number for number in range(ANALYSES))


def _is_due(champion: VersionStats, challenger: VersionStats, plan: Canary, *, analysed: int) -> bool:
    seen = all(version.requests >= plan.requests for version in (champion, challenger))
    return seen and (plan.labels == 0 or analyses_reached(champion, challenger, plan) > analysed)


def _error_rate(version: VersionStats) -> float:
    return version.errors / version.requests if version.requests else 0.0


def _error_of_mean(version: VersionStats) -> float:
    """Return the variance of the mean score."""
    return (version.score_variance or 0.0) / max(version.labelled, 1)


def _scored(
    champion: VersionStats, challenger: VersionStats, scores: ScoreDifference, *, promote: bool, words: str
) -> CanaryVerdict:
    seen = f"{scores.worse_by:+.4f} ± {scores.uncertainty:.4f}, {scores.allowed:+.4f} allowed"
    return CanaryVerdict(
        promote=promote,
        words=f"{words}: its score differs by {seen}, on {challenger.labelled} labels",
        champion=champion,
        challenger=challenger,
        worse_by=scores.worse_by,
        uncertainty=scores.uncertainty,
    )


def _undecided(champion: VersionStats, challenger: VersionStats, plan: Canary) -> CanaryVerdict:
    words = (
        f"too little was seen in time: {challenger.requests} of {plan.requests} requests, "
        f"{challenger.labelled} of {plan.labels} labels"
    )
    return CanaryVerdict(promote=False, words=words, champion=champion, challenger=challenger)
