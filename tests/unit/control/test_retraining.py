"""Retraining step by step, on services that remember what was asked of them."""

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
from falaj.records.record import utc_now
from falaj.records.serving import EndpointStats, VersionStats
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


class Walk:
    """Runs every step once, and lets a wait look three times."""

    workflow = "work_00000000000000000012345678"

    def __init__(self) -> None:
        self.said: list[str] = []
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

    def undo(self, name: str, body: Callable[[], Any]) -> Any:
        return self.run(name, body)

    def report(self, words: str, *, done: int = 0, of: int | None = None) -> None:
        self.said.append(words)


class Record(SimpleNamespace):
    def model_dump(self, *, mode: str) -> Any:
        return json.loads(json.dumps(vars(self), default=str))


class FakeServices:
    """What the workflow touches of the platform; version 1 serves, version 2 is what the job makes."""

    def __init__(
        self, *, score: float = 0.4, approvals: tuple[str, ...] = (), protected: bool = False
    ) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.outputs: dict[str, bytes] = {
            "model.json": json.dumps({"files": ["model/model.onnx"], "metrics": {"auc": 0.7}}).encode(),
            "model/model.onnx": b"onnx",
        }
        self.state = JobState.DONE
        self.score = score
        self.broken_stats = False
        self.approvals = approvals
        self.features = SimpleNamespace(training_set=self._note("training_set", Record(id="dataset_1")))
        self.jobs = SimpleNamespace(submit=self._note("submit", Record(id="job_1")), show=self._job)
        self.blobs = SimpleNamespace(read=lambda blob: iter([self.outputs[blob]]))
        self.challenger = Record(id="version_2", number=2, reference="delays@2", model="model_1")
        serving = Record(id="version_1", number=1, reference="delays@1", model="model_1")
        alias = SimpleNamespace(alias="champion", protected=protected, version="version_1")
        self.models = SimpleNamespace(
            register=self._note("register", self.challenger),
            version=lambda ident: serving if ident == "version_1" else self.challenger,
            show=lambda _model: SimpleNamespace(aliases=(alias,)),
            approvals=lambda _version, *, alias: SimpleNamespace(items=self.approvals),
            promote=self._note("promote", Record(model="delays")),
        )
        self.weights = {"1": 100}
        self.endpoints = SimpleNamespace(show=self._endpoint, route=self._route, stats=self._stats)

        monitors = [SimpleNamespace(id=f"monitor_{n}", endpoint=f"endpoint_{n}") for n in (1, 2)]
        self.monitoring = SimpleNamespace(
            list=lambda **_more: SimpleNamespace(items=monitors),
            set_reference=self._note("set_reference", Record(id="monitor_1")),
        )

    def _endpoint(self, _name: str) -> Any:
        routes = [SimpleNamespace(version=v, weight=w, id=f"version_{v}") for v, w in self.weights.items()]
        return SimpleNamespace(id="endpoint_1", name="delays", model="delays", routes=tuple(routes))

    def _route(self, name: str, *, routes: Any) -> Any:
        self.calls.append(("route", {"first": name, "routes": routes}))
        self.weights = {route.version: route.weight for route in routes}
        return Record(changed_at=utc_now().isoformat())

    def asked(self, name: str) -> list[Any]:
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
        if self.broken_stats:
            raise NotFound("the endpoint is gone")
        many = {"requests": 5000, "labelled": 5000, "score_variance": 0.04}
        versions = (
            VersionStats(version="1", score_mean=0.5, **many),
            VersionStats(version="2", score_mean=self.score, **many),
        )
        return EndpointStats(endpoint="delays", since=since, scoring=None, versions=versions)


def given(**more: Any) -> dict[str, Any]:
    return {
        "pipeline": PLAN.model_dump(mode="json"),
        "code": "blob_1",
        "workspace": "risk",
        "cause": "drift",
    } | more


def weights(services: FakeServices) -> list[dict[str, int]]:
    return [{route.version: route.weight for route in each["routes"]} for each in services.asked("route")]


def test_a_good_model_goes_from_training_set_to_promotion() -> None:
    services, walk = FakeServices(score=0.4), Walk()

    ended = retrain(services, walk, given())  # type: ignore[arg-type]

    assert services.asked("training_set")[0]["last"] == timedelta(days=90)
    assert services.asked("submit")[0]["first"].inputs == {"training": "dataset_1"}
    assert services.asked("register")[0]["metrics"] == {"auc": 0.7}
    assert services.asked("register")[0]["training_set"] == "dataset_1"
    assert weights(services) == [{"1": 90, "2": 10}, {"2": 100}]
    assert services.asked("promote")[0]["to"] == "champion"
    assert services.asked("set_reference") == [{"first": "monitor_1", "reference": "dataset_1"}]
    assert ended["verdict"]["promote"] is True
    assert (ended["cause"], ended["job"], ended["version"]) == ("drift", "job_1", "version_2")


def test_a_worse_model_is_rolled_back_and_not_promoted() -> None:
    services = FakeServices(score=0.9)

    ended = retrain(services, Walk(), given())  # type: ignore[arg-type]

    assert weights(services) == [{"1": 90, "2": 10}, {"1": 100}]
    assert services.asked("promote") == []
    assert "worse" in ended["verdict"]["words"]


def test_a_job_that_fails_ends_it_with_the_jobs_reason() -> None:
    services = FakeServices()
    services.state = JobState.FAILED

    with pytest.raises(Conflict, match="ValueError: no"):
        retrain(services, Walk(), given())  # type: ignore[arg-type]

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
        retrain(services, Walk(), given())  # type: ignore[arg-type]

    assert services.asked("register") == []


def test_a_protected_alias_waits_for_someone_else() -> None:
    services, walk = FakeServices(protected=True), Walk()

    with pytest.raises(AssertionError, match="approval waits"):
        retrain(services, walk, given())  # type: ignore[arg-type]

    assert any("falaj models approve delays@2 --alias champion" in words for words in walk.said)
    assert services.asked("promote") == []


def test_approval_that_does_not_come_in_time_rolls_back() -> None:
    plan = PLAN.model_copy(update={"approval_within": timedelta(seconds=-1)}).model_dump(mode="json")
    services = FakeServices(protected=True)

    ended = canary(services, Walk(), tried(canary=plan["canary"], approval_within=-1.0))  # type: ignore[arg-type]

    assert "nobody approved delays@2" in ended["verdict"]["words"]
    assert weights(services)[-1] == {"1": 100}


def test_what_fails_in_a_canary_leads_back_to_the_champion() -> None:
    services = FakeServices()
    services.broken_stats = True

    ended = canary(services, Walk(), tried(alias=None, canary=Canary().model_dump(mode="json")))  # type: ignore[arg-type]

    assert weights(services) == [{"1": 90, "2": 10}, {"1": 100}]
    assert ended["verdict"] == {"promote": False, "words": "the endpoint is gone"}


def tried(**more: Any) -> dict[str, Any]:
    plan = Canary(requests=10, labels=10).model_dump(mode="json")
    fields = {"endpoint": "risk/delays", "version": "version_2", "alias": "champion", "canary": plan}
    return fields | {"approval_within": 1.0} | more


def test_a_version_of_another_model_is_not_tried() -> None:
    """Its number alone would name a version of the model that serves."""
    services = FakeServices()
    services.challenger.model = "model_2"

    with pytest.raises(Conflict, match="delays@2 is not a version of the model delays"):
        canary(services, Walk(), tried())  # type: ignore[arg-type]

    assert weights(services) == []


def test_a_second_canary_on_the_same_endpoint_is_refused() -> None:
    services = FakeServices()
    services.weights = {"1": 90, "3": 10}

    with pytest.raises(Conflict, match="divides its requests among versions 1, 3"):
        canary(services, Walk(), tried())  # type: ignore[arg-type]

    assert weights(services) == []


@pytest.mark.parametrize("score", [0.4, 0.9], ids=["good", "bad"])
def test_routes_that_somebody_else_set_meanwhile_stay(score: float) -> None:
    services, walk = FakeServices(score=score), Walk()
    stats = services.endpoints.stats

    def route_elsewhere(*args: Any, **given: Any) -> Any:
        services.weights = {"7": 100}
        return stats(*args, **given)

    services.endpoints.stats = route_elsewhere
    ended = canary(services, walk, tried())  # type: ignore[arg-type]

    assert weights(services) == [{"1": 90, "2": 10}]
    assert services.weights == {"7": 100}
    assert (ended["verdict"]["promote"], services.asked("promote")) == (False, [])


def test_a_promotion_that_is_refused_takes_the_requests_back() -> None:
    services = FakeServices(score=0.4)

    def refuse(*_args: Any, **_given: Any) -> Any:
        raise Conflict("the approval was withdrawn")

    services.models.promote = refuse
    ended = canary(services, Walk(), tried())  # type: ignore[arg-type]

    assert weights(services) == [{"1": 90, "2": 10}, {"2": 100}, {"1": 100}]
    assert ended["verdict"] == {"promote": False, "words": "the approval was withdrawn"}


def test_a_step_that_was_interrupted_after_it_had_split_goes_on() -> None:
    services, walk = FakeServices(score=0.4), Walk()

    def twice(name: str, body: Callable[[], Any]) -> Any:
        body()
        return Walk.run(walk, name, body)

    walk.run = twice  # type: ignore[method-assign]
    ended = canary(services, walk, tried(alias=None))  # type: ignore[arg-type]

    assert (ended["verdict"]["promote"], services.weights) == (True, {"2": 100})


def test_versions_that_answer_only_when_they_are_named_stay_so() -> None:
    services = FakeServices(score=0.9)
    services.weights = {"1": 100, "5": 0}

    canary(services, Walk(), tried())  # type: ignore[arg-type]

    assert weights(services) == [{"1": 90, "5": 0, "2": 10}, {"1": 100, "5": 0}]


@pytest.mark.parametrize("manifest", [b"[" * 200_000, b" " * (1 << 20) + b"{}"], ids=["deep", "large"])
def test_a_hostile_description_of_a_model_ends_it(manifest: bytes) -> None:
    services = FakeServices()
    pieces = iter([manifest, *([b" " * (1 << 20)] * 5)])
    services.outputs["model.json"] = b""
    services.blobs.read = lambda _blob: pieces if len(manifest) > 1 << 20 else iter([manifest])

    with pytest.raises(Conflict, match=r"model\.json of the job train"):
        retrain(services, Walk(), given())  # type: ignore[arg-type]

    assert len(list(pieces)) >= 5, "no more was read than tells that it is too large"
