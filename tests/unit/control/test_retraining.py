"""Retraining step by step, on fake services that record their calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from falaj.control.pipelines.canary import canary
from falaj.control.pipelines.retraining import retrain
from falaj.errors import Conflict, NotFound
from falaj.records.control.pipelines import Canary, Pipeline
from falaj.records.control.predictions import PipelinePrediction
from falaj.records.control.workflows import WorkflowState
from falaj.records.names import ObjectId
from falaj.records.record import utc_now
from falaj.records.serving.endpoints import ScoringRule, ServedRoute
from falaj.records.serving.statistics import (
    EndpointObservations,
    EndpointStats,
    Observation,
    VersionCounts,
    VersionStats,
)
from falaj.records.training.jobs import JobSpec, JobState

PLAN = Pipeline(
    name="nightly",
    endpoint="delays",
    model="delays",
    spine="departures",
    window=timedelta(days=90),
    views=("carriers",),
    job=JobSpec(name="train", script="train.py"),
    canary=Canary(requests=10, labels=10),
)


class FakeSteps:
    """Runs every step once, and lets a wait poll three times."""

    workflow = "work_00000000000000000012345678"

    def __init__(self) -> None:
        self.reports: list[str] = []
        self.steps: list[str] = []

    def run(self, name: str, body: Callable[[], Any]) -> Any:
        self.steps.append(name)
        return json.loads(json.dumps(body()))

    def wait(
        self, name: str, poll: Callable[[], Any], *, every_s: float = 1.0, longest_s: float = 10.0
    ) -> Any:
        self.steps.append(name)
        for _ in range(3):
            if (found := poll()) is not None:
                return json.loads(json.dumps(found))
        raise AssertionError(f"{name} waits for ever")

    def as_controller(self, name: str, body: Callable[[], Any]) -> Any:
        return self.run(name, body)

    undo = as_controller

    def report(self, words: str, *, done: int = 0, of: int | None = None) -> None:
        self.reports.append(words)


class Record(SimpleNamespace):
    def model_dump(self, *, mode: str) -> Any:
        return json.loads(json.dumps(vars(self), default=str))


class FakeServices:
    """The services that the workflow calls; version 1 serves, version 2 is made by the job."""

    def __init__(
        self,
        *,
        score: float = 0.4,
        approvals: tuple[str, ...] = (),
        protected: bool = False,
        protected_endpoint: str | None = None,
    ) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.outputs: dict[str, bytes] = {
            "model.json": json.dumps({"files": ["model/model.onnx"], "metrics": {"auc": 0.7}}).encode(),
            "model/model.onnx": b"onnx",
        }
        self.state = JobState.DONE
        self.score = score
        self.broken_stats = False
        self.observed = True
        self.began = timedelta()
        self.approvals = approvals
        self.protected_endpoint = protected_endpoint
        self.features = SimpleNamespace(
            show=lambda _view: SimpleNamespace(zone="frankfurt"),
            training_set=self._note("training_set", Record(id="dataset_1")),
        )
        self.jobs = SimpleNamespace(submit=self._note("submit", Record(id="job_1")), show=self._job)
        self.blobs = SimpleNamespace(read=lambda blob: iter([self.outputs[blob]]))
        self.runs = SimpleNamespace(show=lambda _run: SimpleNamespace(artifacts=()))
        self.nodes = SimpleNamespace(list=lambda: ())
        self.challenger = Record(id="version_2", number=2, reference="delays@2", model="model_1")
        serving = Record(id="version_1", number=1, reference="delays@1", model="model_1")
        alias = SimpleNamespace(alias="champion", protected=protected, independent=False, version="delays@1")
        self.models = SimpleNamespace(
            register=self._note("register", self.challenger),
            version=lambda ident: serving if ident == "version_1" else self.challenger,
            show=lambda _model: SimpleNamespace(aliases=(alias,)),
            approvals=lambda _version, *, alias: SimpleNamespace(items=self.approvals),
            promote=self._note("promote", Record(model="delays")),
        )
        self.weights = {"1": 100}
        self.changed_at = utc_now()
        self.endpoints = SimpleNamespace(
            show=self._endpoint, route=self._route, stats=self._stats, observations=self._observations
        )

        monitors = [SimpleNamespace(id=f"monitor_{n}", endpoint=f"endpoint_{n}") for n in (1, 2)]
        self.monitoring = SimpleNamespace(
            list=lambda **_more: SimpleNamespace(items=monitors),
            set_reference=self._note("set_reference", Record(id="monitor_1")),
        )
        self.pipelines = SimpleNamespace(conclude=self._note("conclude", Record()))

    def _endpoint(self, _name: str) -> Any:
        routes = [
            ServedRoute(version=v, weight=w, id=ObjectId(f"version_{v}")) for v, w in self.weights.items()
        ]
        return SimpleNamespace(
            id="endpoint_1",
            name="delays",
            model="delays",
            routes=tuple(routes),
            protected=self.protected_endpoint,
        )

    def _route(self, name: str, *, routes: Any) -> Any:
        self.calls.append(("route", {"first": name, "routes": routes}))
        self.weights = {route.version: route.weight for route in routes}
        self.changed_at = utc_now() + self.began
        return Record(changed_at=self.changed_at.isoformat())

    def calls_of(self, name: str) -> list[Any]:
        return [given for called, given in self.calls if called == name]

    def _note(self, name: str, answer: Any) -> Callable[..., Any]:
        def note(*args: Any, **given: Any) -> Any:
            self.calls.append((name, given | {"first": args[0]}))
            return answer

        return note

    def _job(self, _ident: str) -> Any:
        spec = PLAN.job.model_dump(mode="json")
        facts = {
            "id": "job_1",
            "name": "train",
            "run": "run_1",
            "state": self.state,
            "reason": "ValueError: no",
        }
        outputs = [{"path": path, "blob": path} for path in self.outputs]
        times = {"submitted_at": utc_now().isoformat(), "workspace": "w", "owner": "sara"}
        return Record(**facts, **times, outputs=outputs, spec=spec, progress=None)

    def _stats(self, _name: str, *, since: Any) -> EndpointStats:
        many = {"requests": 5000, "labelled": 5000, "score_variance": 0.04, "slow_ms": 5.0}
        versions = (
            VersionStats(version="1", score_mean=0.5, **many),
            VersionStats(version="2", score_mean=self.score, **many),
        )
        return EndpointStats(endpoint="delays", since=since, scoring=None, versions=versions)

    def _observations(self, _name: str, *, after: int, limit: int) -> EndpointObservations:
        if self.broken_stats:
            raise NotFound("the endpoint is gone")
        requests = tuple(
            VersionCounts(version=version, requests=count) for version, count in (("1", 18_000), ("2", 2_000))
        )
        scores = {"1": (0.4, 0.6) * 9_000, "2": (self.score - 0.1, self.score + 0.1) * 1_000}
        seen = Observation(number=1, at=utc_now(), requests=requests, scores=scores)
        items = (seen,) if self.observed and after < 1 else ()
        return EndpointObservations(
            endpoint="delays", since=self.changed_at, scoring=ScoringRule.LOG_LOSS, items=items
        )


def given(**more: Any) -> dict[str, Any]:
    return {
        "pipeline": PLAN.model_dump(mode="json"),
        "code": "blob_1",
        "workspace": "risk",
        "cause": "drift",
    } | more


def weights(services: FakeServices) -> list[dict[str, int]]:
    return [{route.version: route.weight for route in each["routes"]} for each in services.calls_of("route")]


def test_a_better_model_goes_from_training_set_to_promotion() -> None:
    services, steps = FakeServices(score=0.4), FakeSteps()

    ended = retrain(services, steps, given())  # type: ignore[arg-type]

    assert services.calls_of("training_set")[0]["last"] == timedelta(days=90)
    assert services.calls_of("training_set")[0]["zone"] == "frankfurt"  # where the spine lies
    assert services.calls_of("submit")[0]["first"].inputs == {"training": "dataset_1"}
    assert services.calls_of("register")[0]["metrics"] == {"auc": 0.7}
    assert services.calls_of("register")[0]["training_set"] == "dataset_1"
    assert weights(services) == [{"1": 90, "2": 10}, {"2": 100}]
    assert services.calls_of("promote")[0]["to"] == "champion"
    assert services.calls_of("set_reference") == [{"first": "monitor_1", "reference": "dataset_1"}]
    assert ended["verdict"]["promote"] is True
    assert (ended["cause"], ended["job"], ended["version"]) == ("drift", "job_1", "version_2")


def test_a_promoted_model_predicts_the_rows_of_a_view() -> None:
    services = FakeServices(score=0.4)
    services.predictions = SimpleNamespace(start=services._note("predict", Record(id="work_2")))
    ended_work = SimpleNamespace(state=WorkflowState.DONE, result={"name": "scores-12345678"}, error=None)
    services.workflows = SimpleNamespace(show=lambda _work: ended_work)
    plan = PLAN.model_copy(
        update={"predicting": PipelinePrediction(view="customers", name="scores", into="risk")}
    )

    ended = retrain(services, FakeSteps(), given(pipeline=plan.model_dump(mode="json")))  # type: ignore[arg-type]

    (called,) = services.calls_of("predict")
    assert (called["first"], called["data"], called["name"]) == (
        "version_2",
        "risk/view:customers",
        "scores-12345678",
    )
    assert called["into"] == "risk/risk"
    assert ended["predictions"] == {"name": "scores-12345678"}


def test_predictions_that_fail_are_told_and_leave_the_promotion() -> None:
    services = FakeServices(score=0.4)
    services.predictions = SimpleNamespace(start=services._note("predict", Record(id="work_2")))
    failed = SimpleNamespace(state=WorkflowState.FAILED, result=None, error="column age is missing")
    services.workflows = SimpleNamespace(show=lambda _work: failed)
    plan = PLAN.model_copy(update={"predicting": PipelinePrediction(view="customers", name="scores")})

    ended = retrain(services, FakeSteps(), given(pipeline=plan.model_dump(mode="json")))  # type: ignore[arg-type]

    assert ended["predictions"] == {"error": "column age is missing"}
    assert ended["verdict"]["promote"] is True


def test_a_worse_model_is_rolled_back_and_not_promoted() -> None:
    services = FakeServices(score=0.9)

    ended = retrain(services, FakeSteps(), given())  # type: ignore[arg-type]

    assert weights(services) == [{"1": 90, "2": 10}, {"1": 100}]
    assert services.calls_of("promote") == []
    assert "worse" in ended["verdict"]["words"]


def test_an_undecided_canary_keeps_the_champion_and_does_not_fail() -> None:
    services = FakeServices()
    services.observed, services.began = False, timedelta(days=-2)

    ended = retrain(services, FakeSteps(), given())  # type: ignore[arg-type]

    assert ended["verdict"]["outcome"] == "undecided"
    assert "nothing against it" in ended["verdict"]["words"]
    assert weights(services) == [{"1": 90, "2": 10}, {"1": 100}]
    assert (services.calls_of("promote"), services.calls_of("set_reference")) == ([], [])
    (told,) = services.calls_of("conclude")
    assert (told["model"], told["verdict"].outcome) == ("version_2", "undecided")


def test_routes_that_were_set_anew_to_the_same_shares_end_the_canary() -> None:
    """The observations were begun anew with them, so those from before are gone."""
    services = FakeServices()
    observations = services.endpoints.observations

    def route_again(*args: Any, **given: Any) -> Any:
        services.changed_at = utc_now()
        return observations(*args, **given)

    services.endpoints.observations = route_again
    ended = canary(services, FakeSteps(), tried())  # type: ignore[arg-type]

    assert "changed by someone else" in ended["verdict"]["words"]


def test_a_job_that_fails_ends_it_with_the_jobs_reason() -> None:
    services = FakeServices()
    services.state = JobState.FAILED

    with pytest.raises(Conflict, match="ValueError: no"):
        retrain(services, FakeSteps(), given())  # type: ignore[arg-type]

    assert weights(services) == []


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (None, "has no output model.json"),
        (b"{", "not what fj.save_model writes"),
        (b'{"files": ["missing.onnx"]}', "not what fj.save_model writes"),
    ],
)
def test_a_job_without_a_proper_description_of_its_model_ends_it(manifest: bytes | None, words: str) -> None:
    services = FakeServices()
    services.outputs.pop("model.json")
    if manifest is not None:
        services.outputs["model.json"] = manifest

    with pytest.raises(Conflict, match=words):
        retrain(services, FakeSteps(), given())  # type: ignore[arg-type]

    assert services.calls_of("register") == []


def test_a_protected_alias_waits_for_an_approval() -> None:
    services, steps = FakeServices(protected=True), FakeSteps()

    with pytest.raises(AssertionError, match="approval waits"):
        retrain(services, steps, given())  # type: ignore[arg-type]

    assert any("falaj models approve delays@2 --alias champion" in words for words in steps.reports)
    assert services.calls_of("promote") == []


def test_approval_that_does_not_come_in_time_rolls_back() -> None:
    plan = PLAN.model_copy(update={"approval_within": timedelta(seconds=-1)}).model_dump(mode="json")
    services = FakeServices(protected=True)

    ended = canary(services, FakeSteps(), tried(canary=plan["canary"], approval_within=-1.0))  # type: ignore[arg-type]

    assert "nobody approved delays@2" in ended["verdict"]["words"]
    assert weights(services)[-1] == {"1": 100}


def test_a_protected_endpoint_sends_no_request_before_the_approval() -> None:
    services, steps = FakeServices(protected_endpoint="champion"), FakeSteps()

    with pytest.raises(AssertionError, match="approval to serve waits"):
        canary(services, steps, tried(alias=None))  # type: ignore[arg-type]

    assert any("falaj models approve delays@2 --alias champion" in words for words in steps.reports)
    assert weights(services) == []


def test_a_protected_endpoint_without_approval_in_time_is_left_alone() -> None:
    services = FakeServices(protected_endpoint="champion")

    ended = canary(services, FakeSteps(), tried(alias=None, approval_within=-1.0))  # type: ignore[arg-type]

    assert "nobody approved delays@2 for champion" in ended["verdict"]["words"]
    assert weights(services) == []


def test_an_approved_version_is_tried_on_a_protected_endpoint() -> None:
    services = FakeServices(protected_endpoint="champion", approvals=("noor",))

    ended = canary(services, FakeSteps(), tried(alias=None))  # type: ignore[arg-type]

    assert ended["verdict"]["promote"]
    assert weights(services)[0] == {"1": 90, "2": 10}


def test_a_failure_during_a_canary_goes_back_to_the_champion() -> None:
    services = FakeServices()
    services.broken_stats = True

    ended = canary(services, FakeSteps(), tried(alias=None, canary=Canary().model_dump(mode="json")))  # type: ignore[arg-type]

    assert weights(services) == [{"1": 90, "2": 10}, {"1": 100}]
    assert ended["verdict"] == {"outcome": "undecided", "promote": False, "words": "the endpoint is gone"}


def tried(**more: Any) -> dict[str, Any]:
    plan = Canary(requests=10, labels=10).model_dump(mode="json")
    fields = {"endpoint": "risk/delays", "version": "version_2", "alias": "champion", "canary": plan}
    return fields | {"approval_within": 1.0} | more


def test_a_version_of_another_model_is_not_tried() -> None:
    """Its number alone would name a version of the model that is served."""
    services = FakeServices()
    services.challenger.model = "model_2"

    with pytest.raises(Conflict, match="delays@2 is not a version of the model delays"):
        canary(services, FakeSteps(), tried())  # type: ignore[arg-type]

    assert weights(services) == []


def test_a_second_canary_on_the_same_endpoint_is_refused() -> None:
    services = FakeServices()
    services.weights = {"1": 90, "3": 10}

    with pytest.raises(Conflict, match="divides its requests among versions 1, 3"):
        canary(services, FakeSteps(), tried())  # type: ignore[arg-type]

    assert weights(services) == []


@pytest.mark.parametrize("score", [0.4, 0.9], ids=["good", "bad"])
def test_routes_set_by_others_meanwhile_stay(score: float) -> None:
    services, steps = FakeServices(score=score), FakeSteps()
    observations = services.endpoints.observations

    def route_elsewhere(*args: Any, **given: Any) -> Any:
        services.weights = {"7": 100}
        return observations(*args, **given)

    services.endpoints.observations = route_elsewhere
    ended = canary(services, steps, tried())  # type: ignore[arg-type]

    assert weights(services) == [{"1": 90, "2": 10}]
    assert services.weights == {"7": 100}
    assert (ended["verdict"]["promote"], services.calls_of("promote")) == (False, [])


def test_a_refused_promotion_routes_requests_back_to_the_champion() -> None:
    services = FakeServices(score=0.4)

    def refuse(*_args: Any, **_given: Any) -> Any:
        raise Conflict("the approval was withdrawn")

    services.models.promote = refuse
    ended = canary(services, FakeSteps(), tried())  # type: ignore[arg-type]

    assert weights(services) == [{"1": 90, "2": 10}, {"2": 100}, {"1": 100}]
    assert (ended["verdict"]["outcome"], ended["verdict"]["promote"]) == ("undecided", False)
    assert ended["verdict"]["words"] == "the approval was withdrawn"


def test_a_step_interrupted_after_the_traffic_split_continues() -> None:
    services, steps = FakeServices(score=0.4), FakeSteps()

    def twice(name: str, body: Callable[[], Any]) -> Any:
        body()
        return FakeSteps.run(steps, name, body)

    steps.run = twice  # type: ignore[method-assign]
    ended = canary(services, steps, tried(alias=None))  # type: ignore[arg-type]

    assert (ended["verdict"]["promote"], services.weights) == (True, {"2": 100})


def test_versions_with_weight_zero_stay_routed() -> None:
    services = FakeServices(score=0.9)
    services.weights = {"1": 100, "5": 0}

    canary(services, FakeSteps(), tried())  # type: ignore[arg-type]

    assert weights(services) == [{"1": 90, "5": 0, "2": 10}, {"1": 100, "5": 0}]


@pytest.mark.parametrize("manifest", [b"[" * 200_000, b" " * (1 << 20) + b"{}"], ids=["deep", "large"])
def test_a_hostile_description_of_a_model_ends_it(manifest: bytes) -> None:
    services = FakeServices()
    pieces = iter([manifest, *([b" " * (1 << 20)] * 5)])
    services.outputs["model.json"] = b""
    services.blobs.read = lambda _blob: pieces if len(manifest) > 1 << 20 else iter([manifest])

    with pytest.raises(Conflict, match=r"model\.json of the job train"):
        retrain(services, FakeSteps(), given())  # type: ignore[arg-type]

    assert len(list(pieces)) >= 5, "no more was read than tells that it is too large"
