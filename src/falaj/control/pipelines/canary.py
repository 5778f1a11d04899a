"""The canary workflow: serve a challenger beside the champion, then promote it, roll it back or keep the champion.

The verdict is computed from the endpoint's observations in the order in which they were stored (`verdict`). It is a
pure function of them: a controller that takes over computes the same from the first one on.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from falaj.control.pipelines.progress import REFERENCE
from falaj.control.pipelines.verdict import CanaryJudge, reference_bounds
from falaj.control.services import Services
from falaj.control.workflows.context import WorkflowContext, to_json
from falaj.errors import Conflict, FalajError
from falaj.ports.workflows import JsonObject
from falaj.records.control.pipelines import Canary, CanaryOutcome, CanaryVerdict
from falaj.records.record import utc_now
from falaj.records.serving.endpoints import Route, ServedRoute
from falaj.records.serving.statistics import EndpointStats, VersionStats

Weights = dict[str, int]
"""Shares of requests by version."""

PAGE = 100
"""Observations that are read at once."""


def canary(services: Services, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Serve a version beside the champion, then promote it, roll it back, or keep the champion."""
    endpoint, plan = given["endpoint"], Canary.model_validate(given["canary"])
    begun = context.run("look at the champion", lambda: _champion(services, endpoint, given["version"]))
    trial = _Trial(services, endpoint, begun, plan)
    verdict: JsonObject = {}
    try:
        verdict = _wait_before_serving(trial, context, given) or _try_out(trial, context, given)
        if verdict["promote"]:
            context.run("route all to it", trial.route_all)
            if given["alias"]:
                context.run("promote", lambda: _promote(services, begun["challenger"], given["alias"]))
    except FalajError as error:
        verdict = {**verdict, **_ended_early(error.message)}
    if not verdict["promote"]:
        context.undo("return to the champion", trial.return_to_champion)
    context.as_controller("tell the verdict", lambda: trial.conclude(context.workflow, verdict))
    return {"version": begun["challenger"], "champion": begun["champion"], "verdict": verdict}


def _ended_early(words: str) -> JsonObject:
    """Return what replaces a verdict where something other than the evidence ends the canary."""
    ended = CanaryVerdict(outcome=CanaryOutcome.UNDECIDED, promote=False, words=words)
    return ended.model_dump(mode="json", include={"outcome", "promote", "words"})


def _wait_before_serving(trial: _Trial, context: WorkflowContext, given: JsonObject) -> JsonObject | None:
    """Wait for the approval that a protected endpoint requires before the first request; return a refusal, if any."""
    alias = trial.begun.get("protected")
    if alias is None:
        return None
    routed = trial.begun["routes"]
    return _wait_for_approval(trial, context, given, name="approval to serve", alias=alias, routed=routed)


def _try_out(trial: _Trial, context: WorkflowContext, given: JsonObject) -> JsonObject:
    """Serve both versions until there is a verdict, and the approval that the alias requires."""
    split = context.run("begin the canary", trial.split)
    observation = _Observation(trial, context, datetime.fromisoformat(split["changed_at"]))
    verdict = context.wait("canary", observation.poll, every_s=0.5)
    if not verdict["promote"] or not given["alias"]:
        return verdict
    refused = _wait_for_approval(
        trial, context, given, name="approval", alias=given["alias"], routed=trial.divided
    )
    return verdict if refused is None else {**verdict, **refused}


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
        "protected": shown.protected,
        **_references(services, endpoint, champion),
    }


def _references(services: Services, endpoint: str, champion: str) -> JsonObject:
    """Return the bound of slow requests and that of scores, from before the canary; none where too little is known."""
    stats = services.endpoints.stats(endpoint, since=utc_now() - REFERENCE)
    slow_above_s, score_bound = reference_bounds(_of(stats, champion), stats.scoring)
    return {"slow_above_s": slow_above_s, "score_bound": score_bound}


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

    def require_routes(self, weights: Weights) -> None:
        self._require(weights)

    def route_all(self) -> JsonObject:
        self._require(self.divided, self.promoted)
        return self._route(self.promoted)

    def return_to_champion(self) -> JsonObject:
        """Restore the routes from before the canary, unless someone else has changed them."""
        ours = self._weights() in (self.divided, self.promoted)
        return self._route(self.begun["routes"]) if ours else {}

    def conclude(self, work: str, verdict: JsonObject) -> JsonObject:
        """Record the verdict, which tells it to whoever gets events."""
        found = CanaryVerdict.model_validate(verdict)
        concluded = self.services.pipelines.conclude(
            self.endpoint, model=self.begun["challenger"], work=work, verdict=found
        )
        return to_json(concluded)

    def _require(self, *weights: Weights) -> None:
        """Raise Conflict unless the routes are one of `weights`; a repeated step finds its own."""
        if self._weights() not in weights:
            raise self.changed()

    def changed(self) -> Conflict:
        return Conflict(
            f"the routes of {self.endpoint} were changed by someone else; they are left as they are"
        )

    def _weights(self) -> Weights:
        return {route.version: route.weight for route in self.services.endpoints.show(self.endpoint).routes}

    def _route(self, weights: Weights) -> JsonObject:
        known = {route.version: route for route in self.services.endpoints.show(self.endpoint).routes}
        routes = tuple(_weighted(known.get(version), version, weight) for version, weight in weights.items())
        return to_json(self.services.endpoints.route(self.endpoint, routes=routes))


def _weighted(known: ServedRoute | None, version: str, weight: int) -> Route:
    """Return a route with a weight; it stays a fallback, and without a weight a shadow."""
    if known is None:
        return Route(version=version, weight=weight)
    shadow = 0 if weight else known.shadow
    return Route(version=version, weight=weight, shadow=shadow, fallback=known.fallback)


class _Observation:
    """Compares both versions until there is a verdict."""

    def __init__(self, trial: _Trial, context: WorkflowContext, since: datetime) -> None:
        self._trial = trial
        self._since = since
        self._report = context.report
        self._names = (trial.begun["champion"], trial.begun["challenger_version"])
        self._judge = CanaryJudge(
            trial.plan,
            champion=self._names[0],
            challenger=self._names[1],
            slow_above_s=trial.begun.get("slow_above_s"),
            score_bound=trial.begun.get("score_bound"),
        )

    def poll(self) -> JsonObject | None:
        """Return the verdict, or None while more requests or labels are needed."""
        self._trial.require_routes(self._trial.divided)
        outcome = self._read_on()
        self._report(f"canary: {self._judge.progress()}")
        elapsed = utc_now() - self._since
        if outcome is CanaryOutcome.UNDECIDED and elapsed <= self._trial.plan.longest:
            return None
        stats = self._trial.services.endpoints.stats(self._trial.endpoint, since=self._since)
        return to_json(self._judge.verdict(*(_of(stats, name) for name in self._names), elapsed=elapsed))

    def _read_on(self) -> CanaryOutcome:
        """Judge the observations that are new, one after the other, up to the first that decides."""
        read = partial(self._trial.services.endpoints.observations, self._trial.endpoint, limit=PAGE)
        while (outcome := self._judge.outcome()) is CanaryOutcome.UNDECIDED:
            page = read(after=self._judge.last)
            if page.since != self._since:
                raise self._trial.changed()
            if self._judge.last == 0 and page.items and page.items[0].number != 1:
                raise Conflict(
                    f"the first observations of {self._trial.endpoint} are gone, so none can be judged"
                )
            for seen in page.items:
                self._judge.add(seen, page.scoring)
                if self._judge.outcome() is not CanaryOutcome.UNDECIDED:
                    break
            if page.next is None:
                return self._judge.outcome()
        return outcome


def _of(stats: EndpointStats, version: str) -> VersionStats:
    return next((each for each in stats.versions if each.version == version), VersionStats(version=version))


def _wait_for_approval(
    trial: _Trial, context: WorkflowContext, given: JsonObject, *, name: str, alias: str, routed: Weights
) -> JsonObject | None:
    """Wait until someone else has approved the version for `alias`; return the refusal if nobody did in time."""
    services, begun = trial.services, trial.begun
    by = utc_now() + timedelta(seconds=given["approval_within"])

    def poll() -> JsonObject | None:
        trial.require_routes(routed)
        if not _needs_approval(
            services, begun["challenger"], alias, protected=alias == begun.get("protected")
        ):
            return {"approved": True}
        if utc_now() > by:
            words = f"nobody approved {begun['reference']} for {alias} in time"
            return _ended_early(words)
        context.report(
            f"waits for approval: falaj models approve {begun['reference']} --alias {alias}, by someone else"
        )
        return None

    answer = context.wait(name, poll)
    return None if answer.get("approved") else answer


def _needs_approval(services: Services, version: str, alias: str, *, protected: bool) -> bool:
    """Tell whether the version lacks the approval that the alias, or the endpoint (`protected`), requires."""
    found = services.models.version(version)
    known = {each.alias: each for each in services.models.show(found.model).aliases}.get(alias)
    if known is not None and known.protected and known.version == found.reference:
        return False
    if not protected and not (known is not None and known.protected):
        return False
    demands = known is not None and known.independent
    approved = services.models.approvals(version, alias=alias).items
    return not any(not demands or each.independent for each in approved)


def _promote(services: Services, version: str, alias: str) -> JsonObject:
    found = services.models.version(version)
    aliases = {each.alias: each for each in services.models.show(found.model).aliases}
    if alias in aliases and aliases[alias].version == found.reference:
        return {}
    return to_json(services.models.promote(version, to=alias))
