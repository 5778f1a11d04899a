"""Endpoints on a real platform: deployed, served, logged, scored, and denied where the rules require it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from falaj.assembly.model_server import service_caller
from falaj.errors import (
    Denied,
    FalajError,
    InvalidInput,
    KeyUnavailable,
    NotFound,
    ResidencyDenied,
    Unavailable,
)
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.record import utc_now
from falaj.records.registry import TensorSpec
from falaj.records.serving.endpoints import Route, ScoringRule
from falaj.records.serving.lookups import Lookup, MissingReason, ViewLookup
from falaj.records.serving.predictions import GroundTruth, InferInput
from falaj.records.serving.settings import ServingSettings
from falaj.records.serving.statistics import VersionCounts
from falaj.serving.service import MODEL_SERVER
from model_files import safetensors
from model_servers import constant, serving_platform
from platforms import TWO_ZONES, OwnPlatform, make_platform
from polling import eventually

X = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 2.0]}
SPEC = TensorSpec(name="x", dtype="float32", shape=(-1, 2), features=("riders__trips", "miles"))
TOML = TWO_ZONES + "\n[serving]\nlog_every = 0.2\n"


ARROW = "application/vnd.apache.arrow.stream"


class Caller:
    """Calls endpoints with a token."""

    def __init__(self, url: str, token: str | None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=url, headers=headers)

    def ask(self, name: str, *inputs: dict[str, Any], **more: Any) -> httpx.Response:
        body = {"inputs": list(inputs) or [X], **more}
        return self._http.post(f"/v2/models/{name}/infer", json=body)

    def until(self, name: str, version: str, *inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the first answer of a version."""

        def answered() -> dict[str, Any] | None:
            answer = self.ask(name, *inputs)
            return answer.json() if answer.json().get("model_version") == version else None

        return eventually(answered)

    def get(self, path: str) -> Any:
        return self._http.get(path).json()

    def send(self, path: str, content: bytes, *, kind: str) -> httpx.Response:
        return self._http.post(path, content=content, headers={"Content-Type": kind})

    def post(self, path: str) -> httpx.Response:
        return self._http.post(path)

    def close(self) -> None:
        self._http.close()


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnPlatform]:
    """A platform with models m (versions 1, 2, 3, which return their number) and weights, which is not ONNX."""
    folder = tmp_path_factory.mktemp("platform")
    with make_platform(folder, toml=TOML) as made:
        for number in (1, 2, 3):
            add_version(made, folder, "m", number)
        weights = made.put("weights", safetensors())
        made.models.register("weights", files=(weights.id,), paths=("model.safetensors",))
        yield made


@pytest.fixture(scope="module")
def url(platform: OwnPlatform) -> Iterator[str]:
    with serving_platform(platform.parts) as found:
        yield found


@pytest.fixture
def caller(platform: OwnPlatform, url: str) -> Iterator[Caller]:
    made = Caller(url, platform.tokens.issue(purpose="test").secret)
    yield made
    made.close()


def add_version(
    platform: OwnPlatform, folder: Path, name: str, value: float, *, workspace: str = "default", **labels: Any
) -> str:
    content = constant(folder / f"{name}-{value}.onnx", value).read_bytes()
    blob = platform.blobs.upload(iter([content]), workspace=workspace, **labels)
    made = platform.models.register(
        name, files=(blob.id,), paths=("model.onnx",), workspace=workspace, inputs=(SPEC,)
    )
    return made.reference


# ---------------------------------------------------------------------------------------- deploy and route


@pytest.mark.slow
def test_a_deployed_version_answers_and_routes_move(platform: OwnPlatform, caller: Caller, url: str) -> None:
    made = platform.endpoints.deploy("moves", model="m@1")
    first = caller.until("moves", "1")
    routed = platform.endpoints.route(
        "moves", routes=(Route(version="m@2", weight=1), Route(version="1", weight=0))
    )
    caller.until("moves", "2")

    assert (made.url, made.routes[0].version) == (f"{url}/v2/models/moves", "1")
    assert first["outputs"][0]["data"] == [1.0]
    assert [(route.version, route.weight) for route in routed.routes] == [("2", 1), ("1", 0)]
    assert routed.previous == (Route(version="1"),)
    assert caller.ask("moves/versions/1").json()["model_version"] == "1"


def test_deploying_again_routes_everything_there(platform: OwnPlatform, caller: Caller) -> None:
    platform.endpoints.deploy("again", model="m@1", scoring=ScoringRule.LOG_LOSS)

    made = platform.endpoints.deploy("again", model="m@3")

    assert [route.version for route in made.routes] == ["3"]
    assert (made.previous, made.scoring) == ((Route(version="1"),), ScoringRule.LOG_LOSS)
    caller.until("again", "3")


def test_settings_reach_the_model_server_and_what_it_measured_is_shown(
    platform: OwnPlatform, caller: Caller
) -> None:
    platform.endpoints.deploy("tuned", model="m@1")
    measured = eventually(lambda: platform.endpoints.show("tuned").measured)

    made = platform.endpoints.configure("tuned", max_queue_ms=70, instances=3, requests_per_second=1, burst=2)
    changed = eventually(
        lambda: [m for m in platform.endpoints.show("tuned").measured if m.max_queue_ms == 70]
    )
    statuses = [caller.ask("tuned").status_code for _ in range(4)]
    platform.endpoints.configure("tuned")
    eventually(lambda: platform.endpoints.show("tuned").measured[0].max_queue_ms == 1000)

    assert (measured[0].version, measured[0].place) == ("1", "event loop")
    assert made.settings == ServingSettings(max_queue_ms=70, instances=3, requests_per_second=1, burst=2)
    assert changed[0].instances == 3
    assert (statuses[0], statuses[-1]) == (200, 429)
    assert caller.ask("tuned").status_code == 200


def test_versions_are_named_by_their_aliases(platform: OwnPlatform) -> None:
    platform.models.promote("m@2", to="champion")
    dana = platform.join("reader", Role.VIEWER)

    made = platform.endpoints.deploy("aliased", model="m@champion")
    platform.models.promote("m@3", to="champion")
    routes = (Route(version="champion", weight=9), Route(version="2", weight=1))
    routed = platform.endpoints.route("aliased", routes=routes)

    assert [each.version for each in made.routes] == ["2"]  # as it was: an endpoint does not follow an alias
    assert [(each.version, each.weight) for each in routed.routes] == [("3", 9), ("2", 1)]
    assert platform.models.version("m@champion").reference == "m@3"
    assert platform.models.version("default/m@champion").reference == "m@3"
    assert platform.objects.show("model_version:m@champion").name == "m@3"
    with acting_as(dana):
        assert platform.models.version("m@champion").reference == "m@3"
    for unknown in ("m@nobody", "nothere@champion", "m@"):
        with pytest.raises((NotFound, InvalidInput)):
            platform.models.version(unknown)
    with pytest.raises(InvalidInput, match="routes is not valid"):  # the alias is version 3
        platform.endpoints.route("aliased", routes=(Route(version="champion"), Route(version="3")))


@pytest.mark.slow
def test_a_model_server_that_cannot_listen_is_a_problem_of_the_endpoint(tmp_path: Path) -> None:
    words = "the model server cannot listen on 127.0.0.1:7481"
    facts = {"url": "http://127.0.0.1:1", "pid": os.getpid(), "models": None, "models_problem": words}
    with make_platform(tmp_path) as platform, platform.home.lock():
        add_version(platform, tmp_path, "m", 1)
        platform.home.running.write_text(json.dumps(facts))  # as `falaj up` publishes it

        found = platform.endpoints.deploy("unreached", model="m@1")

    assert (found.url, found.problem) == (None, words)


def test_a_removed_endpoint_is_gone_and_its_name_reusable(platform: OwnPlatform, caller: Caller) -> None:
    platform.endpoints.deploy("short", model="m@1")
    caller.until("short", "1")

    platform.endpoints.remove("short")

    eventually(lambda: caller.ask("short").status_code == 404)
    with pytest.raises(NotFound):
        platform.endpoints.show("short")
    platform.endpoints.deploy("short", model="m@2")
    caller.until("short", "2")


def test_endpoints_of_other_workspaces_have_them_in_their_paths(
    platform: OwnPlatform, caller: Caller, tmp_path: Path
) -> None:
    platform.workspaces.create("risk")
    add_version(platform, tmp_path, "m", 7, workspace="risk")

    made = platform.endpoints.deploy("moves", model="risk/m@1", workspace="risk")

    assert caller.until("risk/moves", "1")["outputs"][0]["data"] == [7.0]
    assert made.url is not None
    assert made.url.endswith("/v2/models/risk/moves")
    assert [each.name for each in platform.endpoints.list(workspace="risk").items] == ["moves"]


def refused(kind: type[FalajError], platform: OwnPlatform, name: str = "refused", **given: Any) -> str:
    with pytest.raises(kind) as caught:
        platform.endpoints.deploy(name, **({"model": "m@1"} | given))
    with pytest.raises(NotFound):
        platform.endpoints.show(name)
    return str(caught.value)


def lookup(view: str = "riders", **more: Any) -> Lookup:
    return Lookup(views=(ViewLookup(view=view),), **more)


def test_versions_that_cannot_be_served_are_refused_with_the_reason(
    platform: OwnPlatform, riders: str
) -> None:
    assert "weights alone are no model" in refused(InvalidInput, platform, model="weights@1")
    assert "m@99" in refused(NotFound, platform, model="m@99")
    assert "not reserved by the inference protocol" in refused(InvalidInput, platform, "infer")
    assert "nothere" in refused(NotFound, platform, lookup=lookup("nothere"))
    assert "3 columns" in refused(InvalidInput, platform, lookup=lookup(features=("trips", "a", "b")))
    assert "none of its features" in refused(InvalidInput, platform, lookup=lookup(features=("a", "b")))
    keys = Lookup(views=(ViewLookup(view="riders", keys=("a", "b")),))
    assert "one for each of rider" in refused(InvalidInput, platform, lookup=keys)


def test_a_route_leads_to_versions_of_the_model_only(platform: OwnPlatform) -> None:
    platform.endpoints.deploy("routes", model="m@1")
    route = platform.endpoints.route

    with pytest.raises(InvalidInput, match="unknown version"):
        route("routes", routes=(Route(version="9"), Route(version="weights@1")))
    with pytest.raises(InvalidInput, match="routes is not valid"):
        route("routes", routes=(Route(version="1"), Route(version="m@1")))
    with pytest.raises(InvalidInput, match="routes is not valid"):
        route("routes", routes=(Route(version="1", weight=0),))
    assert [each.version for each in platform.endpoints.show("routes").routes] == ["1"]


def test_residency_and_permissions_are_checked_before_serving(platform: OwnPlatform, tmp_path: Path) -> None:
    add_version(platform, tmp_path, "german", 1, zone="frankfurt", only=("DE",))
    dana = platform.join("dana", Role.VIEWER)

    assert "frankfurt" in platform.endpoints.deploy("bound", model="german@1", zone="frankfurt").zone
    assert "may not lie in zone local" in refused(ResidencyDenied, platform, model="german@1")
    with acting_as(dana), pytest.raises(Denied):
        platform.endpoints.deploy("hers", model="m@1")
    with acting_as(dana), pytest.raises(Denied):
        platform.endpoints.report("bound", counts=())
    with pytest.raises(Denied, match="only the platform's own services"):
        platform.endpoints.report("bound", counts=(VersionCounts(version="1", requests=9),))
    with platform.as_controller(), pytest.raises(Denied, match="only the service model-server"):
        platform.endpoints.report("bound", counts=(VersionCounts(version="1", requests=9),))


# --------------------------------------------------------------------------------------------- permissions


def test_a_revoked_token_is_refused(platform: OwnPlatform, url: str) -> None:
    platform.endpoints.deploy("guarded", model="m@1")
    issued = platform.tokens.issue(purpose="short life")
    caller = Caller(url, issued.secret)
    caller.until("guarded", "1")

    platform.tokens.revoke(issued.token.id)

    eventually(lambda: caller.ask("guarded").status_code == 401)
    caller.close()


def test_a_caller_without_access_cannot_tell_whether_an_endpoint_exists(
    platform: OwnPlatform, url: str
) -> None:
    platform.endpoints.deploy("secret", model="m@1")
    platform.join("sam")
    platform.join("vera", Role.VIEWER)
    sam, vera, nobody = (
        Caller(url, platform.tokens.issue(purpose="t", user=who).secret if who else None)
        for who in ("sam", "vera", None)
    )

    eventually(lambda: vera.ask("secret").status_code == 200)
    hidden, missing = sam.ask("secret"), sam.ask("nothing")

    assert (hidden.status_code, hidden.json()["error"]) == (
        404,
        missing.json()["error"].replace("nothing", "secret"),
    )
    assert nobody.ask("secret").status_code == 401
    guesser = Caller(url, "fj_x.y")
    assert guesser.ask("secret").status_code == 401
    platform.parts.failures.flush(whole_window=False)
    failed = [each for each in platform.entries() if each["action"] == "tokens.authenticate"]
    assert {each["rule"] for each in failed} >= {"model-server: no_token", "model-server: refused_token"}
    assert {each["origin"] for each in failed} == {"remote:127.0.0.1"}
    assert sam._http.get("/metrics").status_code == 403
    for each in (sam, vera, nobody, guesser):
        each.close()


def test_existence_shows_neither_in_the_words_nor_in_the_work_of_a_refusal(
    platform: OwnPlatform, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However an endpoint is named, the answer has what was sent and nothing else, and the same checks led to it."""
    ident = platform.endpoints.deploy("concealed", model="m@1").id
    platform.workspaces.create("vault")
    platform.join("tim")
    tim = Caller(url, platform.tokens.issue(purpose="t", user="tim").secret)
    eventually(lambda: platform.endpoints.show("concealed").routes[0].problem is None)
    steps: list[str] = []
    gate = platform.parts.gate
    for what, name in ((gate.authorizer, "decide"), (gate.audit, "append_grouped")):
        noted = partial(_noted, getattr(what, name), name, steps)
        monkeypatch.setattr(what, name, noted)

    def work(name: str) -> tuple[int, str, list[str]]:
        steps.clear()
        answer = tim.ask(name)
        words = answer.json()["error"].replace(name.partition("/versions/")[0], "NAME")
        return answer.status_code, words, list(steps)

    work("nothing")  # authenticates
    expected = work("nothing-either")
    named = [work(name) for name in ("concealed", "concealed/versions/1", "concealed/versions/9", ident)]
    elsewhere = [work(name) for name in ("vault/concealed", "nowhere/concealed", "endpoint_" + "0" * 26)]
    tim.close()

    assert expected[0] == 404
    assert expected[2] == ["decide", "decide", "append_grouped"]
    assert named + elsewhere == [expected] * 7


def _noted(inner: Callable[..., Any], name: str, steps: list[str], *given: Any) -> Any:
    who = given[0]["caller"] if name == "append_grouped" else given[1].name
    if who == "tim":
        steps.append(name)
    return inner(*given)


def test_requests_are_audited_in_windows(platform: OwnPlatform, caller: Caller) -> None:
    platform.endpoints.deploy("audited", model="m@1")
    caller.until("audited", "1")
    for _ in range(5):
        caller.ask("audited")

    platform.parts.gate.hot.flush(all_windows=True)

    ident = platform.endpoints.show("audited").id
    windows = [e for e in platform.entries() if e["action"] == "endpoints.infer" and e["objects"] == [ident]]
    assert sum(entry["count"] for entry in windows) >= 6
    assert {entry["origin"] for entry in windows} == {"remote:model-server"}


def test_the_infer_operation_uses_the_internal_route(platform: OwnPlatform, caller: Caller) -> None:
    platform.endpoints.deploy("inner", model="m@2")
    caller.until("inner", "2")
    given = (InferInput(name="x", shape=(1, 2), datatype="FP32", data=[1.0, 2.0]),)

    answer = platform.endpoints.infer("inner", inputs=given, request="mine")

    assert (answer.model_version, answer.id, answer.outputs[0].data) == ("2", "mine", [2.0])
    assert logged(platform, str(answer.prediction)).caller == platform.users.whoami().principal.name
    with pytest.raises(InvalidInput, match=r"given shape \[1, 1\]"):
        platform.endpoints.infer(
            "inner", inputs=(InferInput(name="x", shape=(1, 1), datatype="FP32", data=[1.0]),)
        )


# ------------------------------------------------------------------------------------ the prediction log


def logged(platform: OwnPlatform, ident: str) -> Any:
    """Return a prediction, once it is in the log."""

    def found() -> Any:
        try:
            return platform.endpoints.prediction(ident)
        except NotFound:
            return None

    return eventually(found)


def test_a_prediction_leads_to_its_model_and_inputs(platform: OwnPlatform, caller: Caller) -> None:
    platform.endpoints.deploy("logged", model="m@2")
    caller.until("logged", "2")
    answer = caller.ask("logged", id="order-7")

    ident = answer.headers["falaj-prediction"]
    found = logged(platform, ident)
    nodes = {node.name for node in platform.lineage.graph(ident) if node.depth < 0}

    assert answer.json()["parameters"]["prediction"] == ident
    assert (found.endpoint, found.version, found.request) == ("logged", "2", "order-7")
    assert (found.inputs, found.outputs) == ({"riders__trips": 0.5, "miles": 2.0}, {"y": [2.0]})
    assert {"m@2", "logged"} <= nodes
    with pytest.raises(NotFound):
        platform.endpoints.prediction(ident.rpartition("-")[0] + "-999999")


@pytest.mark.slow
def test_a_sweep_leaves_the_log_alone(platform: OwnPlatform, caller: Caller) -> None:
    platform.endpoints.deploy("swept", model="m@1")
    ident = caller.until("swept", "1")["id"]
    logged(platform, ident)
    platform.clock.advance(timedelta(days=3))

    platform.blobs.cleanup()

    with platform.again() as other:  # which has not decoded the batch yet
        assert other.endpoints.prediction(ident).version == "1"


def test_labels_are_joined_and_scored_by_version(platform: OwnPlatform, caller: Caller) -> None:
    platform.endpoints.deploy("scored", model="m@1", scoring=ScoringRule.SQUARED_ERROR)
    caller.until("scored", "1")
    names = [caller.ask("scored").json()["id"] for _ in range(4)]
    platform.endpoints.route("scored", routes=(Route(version="3"),))
    names.append(caller.until("scored", "3")["id"])
    for name in names:
        logged(platform, name)

    labels = tuple(
        GroundTruth(id=name, value=value) for name, value in zip(names, (0, 2, 1, 3, 3), strict=True)
    )
    first = platform.endpoints.feedback(
        "scored", predictions=(*labels, GroundTruth(id=f"{names[0]}99999", value=1))
    )
    again = platform.endpoints.feedback("scored", predictions=labels[:1])
    stats = {each.version: each for each in platform.endpoints.stats("scored").versions}

    assert (first.stored, first.unknown) == (5, (f"{names[0]}99999",))
    assert (again.stored, again.replaced) == (1, 1)
    assert (stats["1"].labelled, stats["1"].score_mean) == (4, 1.5)  # errors 1, 1, 0 and 4
    assert stats["1"].score_variance == pytest.approx(3.0)
    assert (stats["3"].labelled, stats["3"].score_mean) == (1, 0)
    eventually(lambda: platform.endpoints.stats("scored").versions[0].requests >= 5)
    assert logged(platform, names[0]).label == 0


def test_rows_of_one_request_are_labelled_one_by_one(platform: OwnPlatform, caller: Caller) -> None:
    platform.endpoints.deploy("rows", model="m@1")
    caller.until("rows", "1")
    ident = caller.ask("rows", X | {"shape": [2, 2], "data": [1, 2, 3, 4]}).json()["id"]
    assert logged(platform, f"{ident}.1").inputs["miles"] == 4

    result = platform.endpoints.feedback(
        "rows", predictions=(GroundTruth(id=f"{ident}.1", value=1), GroundTruth(id=ident, value=1))
    )

    assert (result.stored, result.unknown) == (1, (ident,))
    assert platform.endpoints.stats("rows").scoring is ScoringRule.LOG_LOSS


def test_one_prediction_counts_once_however_its_id_is_spelled(platform: OwnPlatform, caller: Caller) -> None:
    """Otherwise one prediction could decide a canary."""
    platform.endpoints.deploy("spelled", model="m@1", scoring=ScoringRule.SQUARED_ERROR)
    ident = caller.until("spelled", "1")["id"]
    logged(platform, ident)
    batch, _, number = ident.rpartition("-")
    spelled = (f"{ident}.0", f"{batch}-0{number}", f"{ident}.00", f"{batch}-{'9' * 60}", batch)

    first = platform.endpoints.feedback("spelled", predictions=(GroundTruth(id=ident, value=3),))
    again = platform.endpoints.feedback(
        "spelled", predictions=tuple(GroundTruth(id=each, value=2) for each in (ident, *spelled))
    )

    assert (first.stored, again.stored, again.replaced) == (1, 1, 1)
    assert again.unknown == spelled[1:]
    assert platform.endpoints.stats("spelled").versions[0].labelled == 1
    assert platform.endpoints.prediction(f"{ident}.0").label == 2


def test_counts_restart_when_routes_change(platform: OwnPlatform) -> None:
    """A canary compares both versions since it began, not since the beginning of the minute."""
    platform.endpoints.deploy("counted", model="m@1")
    platform.clock.now = platform.clock().replace(second=10)
    report = VersionCounts(version="1", requests=100, errors=90, latency=())
    with acting_as(service_caller(platform.parts.gate, MODEL_SERVER, Role.OPERATOR)):
        platform.endpoints.report("counted", counts=(report,))
    platform.clock.advance(timedelta(seconds=20))
    changed = platform.endpoints.route("counted", routes=(Route(version="1"), Route(version="2", weight=10)))
    platform.clock.advance(timedelta(seconds=5))
    with acting_as(service_caller(platform.parts.gate, MODEL_SERVER, Role.OPERATOR)):
        platform.endpoints.report("counted", counts=(report.model_copy(update={"requests": 7, "errors": 0}),))

    (since,) = platform.endpoints.stats("counted", since=changed.changed_at).versions
    (whole,) = platform.endpoints.stats("counted").versions

    assert (since.requests, since.errors) == (7, 0)
    assert (whole.requests, whole.errors) == (107, 90)


def test_observations_have_each_request_and_each_first_label_once(
    platform: OwnPlatform, caller: Caller
) -> None:
    platform.endpoints.deploy("observed", model="m@1", scoring=ScoringRule.SQUARED_ERROR)
    before = caller.until("observed", "1")["id"]
    platform.clock.now = utc_now()
    split = platform.endpoints.route("observed", routes=(Route(version="1"), Route(version="2", weight=10)))
    caller.until("observed", "2")
    single = caller.until("observed", "2")["id"]
    double = caller.until("observed", "1", X | {"shape": [2, 2], "data": [1, 2, 3, 4]})["id"]
    for name in (before, single, f"{double}.0"):
        logged(platform, name)

    labels = {before: 0, single: 3, f"{double}.0": 1, f"{double}.1": 3}
    for _ in range(2):
        predictions = tuple(GroundTruth(id=name, value=value) for name, value in labels.items())
        platform.endpoints.feedback("observed", predictions=predictions)
        labels[single] = 2

    def counted() -> bool:
        seen = platform.endpoints.observations("observed").items
        return sum(each.requests for seen in seen for each in seen.requests if each.version == "2") >= 2

    eventually(counted)
    found = platform.endpoints.observations("observed")
    assert found.since == split.changed_at
    assert [each.scores for each in found.items if each.scores] == [{"2": (1.0,), "1": (2.0,)}]
    numbers = [each.number for each in found.items]
    assert numbers == list(range(1, len(numbers) + 1))
    page = platform.endpoints.observations("observed", limit=1)
    assert (page.items, page.next) == (found.items[:1], 1)
    assert platform.endpoints.observations("observed", after=1).items[: len(numbers) - 1] == found.items[1:]

    platform.endpoints.route("observed", routes=(Route(version="1"),))
    assert platform.endpoints.observations("observed").items == ()


# -------------------------------------------------------------------------------------------- feature lookup


@pytest.fixture(scope="module")
def riders(platform: OwnPlatform) -> str:
    """A view with two features of riders a and b, online."""
    from falaj.records.features import ColumnType, Entity, Feature, FeatureView

    view = FeatureView(
        name="riders",
        entities=("rider",),
        columns=(
            Feature(name="trips", type=ColumnType.INTEGER),
            Feature(name="home", type=ColumnType.TEXT),
        ),
    )
    platform.features.apply(entities=(Entity(name="rider", key="rider"),), views=(view,))
    rows = b"rider,trips,home,event_time\na,4,x,2026-01-01T00:00:00Z\nb,5,y,2026-01-01T00:00:00Z\n"
    platform.features.ingest("riders", data=platform.put("riders.csv", rows).id)
    platform.features.materialize("riders")
    return "riders"


def test_the_metadata_names_the_inputs_of_a_request(
    platform: OwnPlatform, caller: Caller, riders: str
) -> None:
    platform.endpoints.deploy("described", model="m@1", lookup=lookup(missing=0))
    platform.endpoints.deploy("plain", model="m@1")
    caller.until("plain", "1")

    def about(name: str) -> Any:
        return caller.get(f"/v2/models/{name}")

    eventually(lambda: "inputs" in about("described"))
    own = [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
    assert about("described")["inputs"] == [
        {"name": "rider", "datatype": "BYTES", "shape": [-1]},
        {"name": "miles", "datatype": "FP64", "shape": [-1]},
    ]
    assert about("described")["model_inputs"] == own
    assert about("plain")["inputs"] == own
    assert "model_inputs" not in about("plain")
    assert about("described/versions/1") == about("described")


def test_features_are_read_by_key_inside_the_endpoint(
    platform: OwnPlatform, caller: Caller, riders: str
) -> None:
    made = platform.endpoints.deploy("looked", model="m@1", lookup=lookup(missing=0))
    keys = {"name": "rider", "shape": [2], "datatype": "BYTES", "data": ["b", "nobody"]}
    miles = {"name": "miles", "shape": [2], "datatype": "FP64", "data": [1.5, 2.5]}

    ident = caller.until("looked", "1", keys, miles)["id"]

    assert made.lookup is not None
    assert made.lookup.views[0].keys == ("rider",)
    assert logged(platform, f"{ident}.0").inputs == {"riders__trips": 5.0, "miles": 1.5}
    assert logged(platform, f"{ident}.1").inputs == {"riders__trips": 0.0, "miles": 2.5}
    assert "riders" in {node.name for node in platform.lineage.graph(ident) if node.depth < 0}


def rider_keys(*keys: str) -> tuple[dict[str, Any], dict[str, Any]]:
    riders = {"name": "rider", "shape": [len(keys)], "datatype": "BYTES", "data": list(keys)}
    return riders, {"name": "miles", "shape": [len(keys)], "datatype": "FP64", "data": [1.0] * len(keys)}


def infer_inputs(*keys: str) -> tuple[InferInput, ...]:
    return tuple(InferInput(**each) for each in rider_keys(*keys))


def test_a_label_of_a_prediction_that_is_no_number_is_stored_without_a_score(
    platform: OwnPlatform, caller: Caller, riders: str
) -> None:
    platform.endpoints.deploy("nulls", model="m@1", lookup=lookup())
    ident = caller.until("nulls", "1", *rider_keys("a", "nobody"))["id"]
    logged(platform, f"{ident}.1")

    nothing = platform.endpoints.feedback("nulls", predictions=(GroundTruth(id=f"{ident}.1", value=1),))
    undecided = platform.endpoints.stats("nulls").scoring
    both = tuple(GroundTruth(id=f"{ident}.{row}", value=1) for row in (0, 1))
    again = platform.endpoints.feedback("nulls", predictions=both)
    stats = platform.endpoints.stats("nulls")

    assert (nothing.stored, nothing.unscored) == (1, (f"{ident}.1",))
    assert undecided is None  # what is no number does not choose the scoring
    assert (again.stored, again.replaced, again.unscored) == (2, 1, (f"{ident}.1",))
    assert stats.scoring is ScoringRule.LOG_LOSS
    assert (stats.versions[0].labelled, stats.versions[0].unscored) == (1, 1)
    assert stats.versions[0].score_mean == pytest.approx(0)
    found = platform.endpoints.prediction(f"{ident}.1")
    assert (found.label, found.score) == (1, None)


def test_labels_that_are_no_class_are_named_and_nothing_is_stored(
    platform: OwnPlatform, caller: Caller
) -> None:
    platform.endpoints.deploy("classes", model="m@1", scoring=ScoringRule.LOG_LOSS)
    names = [caller.until("classes", "1")["id"] for _ in range(3)]
    for name in names:
        logged(platform, name)

    with pytest.raises(InvalidInput, match="2 labels do not fit") as caught:
        platform.endpoints.feedback(
            "classes",
            predictions=tuple(
                GroundTruth(id=name, value=value) for name, value in zip(names, (1, 7, 0.5), strict=True)
            ),
        )

    assert [fault.where for fault in caught.value.faults] == names[1:]
    assert eventually(lambda: platform.endpoints.stats("classes").versions)[0].labelled == 0


def test_the_answer_says_why_a_feature_is_missing(platform: OwnPlatform, caller: Caller, riders: str) -> None:
    platform.endpoints.deploy("gaps", model="m@1", lookup=lookup())
    caller.until("gaps", "1", *rider_keys("a"))

    answer = platform.endpoints.infer("gaps", inputs=infer_inputs("nobody", "b"), request="mine")

    (gap,) = answer.missing
    assert (gap.row, gap.view, gap.key, gap.reason) == (0, "riders", "nobody", MissingReason.UNKNOWN_KEY)
    assert (gap.features, answer.missing_rows) == (("riders__trips",), 1)
    assert (answer.outputs[0].data, answer.outputs[0].not_finite) == ([None, 1.0], 1)
    assert answer.prediction is not None
    assert answer.prediction != "mine"


def test_features_older_than_their_ttl_are_expired(platform: OwnPlatform, caller: Caller) -> None:
    from falaj.records.features import ColumnType, Entity, Feature, FeatureView

    trips = Feature(name="trips", type=ColumnType.INTEGER)
    view = FeatureView(name="fresh", entities=("rider",), columns=(trips,), ttl=timedelta(days=9))
    platform.features.apply(entities=(Entity(name="rider", key="rider"),), views=(view,))
    rows = "rider,trips,event_time\nold,4,2020-01-01T00:00:00Z\nnew,,{:%Y-%m-%dT%H:%M:%SZ}\n"
    data = platform.put("fresh.csv", rows.format(platform.clock() - timedelta(hours=1)).encode())
    platform.features.ingest("fresh", data=data.id)
    platform.features.materialize("fresh")
    platform.endpoints.deploy("aging", model="m@1", lookup=lookup("fresh", features=("trips", "miles")))
    caller.until("aging", "1", *rider_keys("new"))

    answer = platform.endpoints.infer("aging", inputs=infer_inputs("old", "new"))

    assert [gap.reason for gap in answer.missing] == [MissingReason.EXPIRED, MissingReason.NULL]


def test_the_endpoint_decides_about_missing_features(
    platform: OwnPlatform, caller: Caller, riders: str
) -> None:
    strict = platform.endpoints.deploy("strict", model="m@1", lookup=lookup(missing="reject"))
    caller.until("strict", "1", *rider_keys("a"))
    with pytest.raises(InvalidInput, match="row 1, feature riders__trips: given rider 'nobody'"):
        platform.endpoints.infer("strict", inputs=infer_inputs("a", "nobody"))
    refused_at_url = caller.ask("strict", *rider_keys("nobody"))

    rule = lookup(missing="reject", defaults={"riders__trips": 3})
    platform.endpoints.deploy("strict", model="m@2", lookup=rule)
    ident = caller.until("strict", "2", *rider_keys("nobody"))["id"]

    assert strict.lookup is not None
    assert strict.lookup.missing == "reject"
    assert refused_at_url.status_code == 400
    assert logged(platform, ident).inputs["riders__trips"] == 3
    with pytest.raises(InvalidInput, match="does not fit the model") as caught:
        platform.endpoints.deploy("strict", model="m@1", lookup=lookup(defaults={"mils": 1}))
    assert caught.value.faults[0].allowed == "the columns riders__trips, miles"


# --------------------------------------------------------------------------------------------------- failures


def test_a_version_whose_bytes_were_changed_is_not_served_and_the_rest_is(
    platform: OwnPlatform, caller: Caller, tmp_path: Path
) -> None:
    add_version(platform, tmp_path, "hurt", 1)
    add_version(platform, tmp_path, "hurt", 2)
    platform.endpoints.deploy("hurt", model="hurt@1")
    caller.until("hurt", "1")
    damage(platform, platform.models.version("hurt@2").files[0].blob)

    platform.endpoints.route("hurt", routes=(Route(version="1", weight=1), Route(version="2", weight=99)))
    problem = eventually(lambda: platform.endpoints.show("hurt").routes[1].problem)
    platform.endpoints.deploy("hurt", model="hurt@2")

    assert problem
    assert {caller.ask("hurt").json()["model_version"] for _ in range(20)} == {"1"}
    eventually(lambda: platform.endpoints.show("hurt").routes[0].problem)
    assert caller.ask("hurt").json()["model_version"] == "1"  # the earlier version stays


def test_a_version_forbidden_in_its_zone_is_no_longer_served(
    platform: OwnPlatform, caller: Caller, tmp_path: Path
) -> None:
    reference = add_version(platform, tmp_path, "moved", 1)
    platform.endpoints.deploy("moved", model=reference)
    caller.until("moved", "1")

    platform.objects.label(f"model_version:{reference}", only=("FR",))

    eventually(lambda: caller.ask("moved").status_code == 404)
    eventually(lambda: "its label has changed" in str(platform.endpoints.show("moved").routes[0].problem))


def test_when_a_key_is_destroyed_its_models_and_predictions_are_gone_from_memory_too(
    platform: OwnPlatform, caller: Caller, tmp_path: Path
) -> None:
    platform.workspaces.create("erased")
    add_version(platform, tmp_path, "m", 8, workspace="erased")
    platform.endpoints.deploy("e", model="erased/m@1", workspace="erased")
    ident = caller.until("erased/e", "1")["id"]
    assert logged(platform, ident).outputs == {"y": [8]}

    platform.keys.destroy("erased")

    eventually(lambda: caller.ask("erased/e").status_code == 404)
    with pytest.raises(KeyUnavailable):
        platform.endpoints.prediction(ident)


def damage(platform: OwnPlatform, blob: str) -> None:
    (path,) = (each for each in platform.home.blobs.rglob("*") if each.is_file() and blob in str(each))
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_a_missing_model_server_is_reported(tmp_path: Path) -> None:
    with make_platform(tmp_path) as platform:
        add_version(platform, tmp_path, "m", 1)
        platform.endpoints.deploy("m", model="m@1")

        with pytest.raises(Unavailable, match="falaj up"):
            platform.endpoints.infer("m", inputs=(InferInput(**X),))
        assert platform.home.serving.exists()
        assert platform.endpoints.show("m").url is None
        result = platform.endpoints.feedback("m", predictions=(GroundTruth(id="x-1", value=1),))
        assert (result.stored, result.unknown) == (0, ("x-1",))


@pytest.mark.slow
def test_deploying_and_serving_works_on_both_databases(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with make_platform(tmp_path, database_url, TOML, environment=monkeypatch) as platform:
        add_version(platform, tmp_path, "m", 1)
        add_version(platform, tmp_path, "nan", float("nan"))
        platform.endpoints.deploy("m", model="m@1")
        platform.endpoints.deploy("nan", model="nan@1")
        with serving_platform(platform.parts) as url:
            caller = Caller(url, platform.tokens.issue(purpose="t").secret)
            ident, nan = caller.until("m", "1")["id"], caller.until("nan", "1")["id"]
            logged(platform, ident)
            logged(platform, nan)
            caller.close()
        nothing = platform.endpoints.feedback("nan", predictions=(GroundTruth(id=nan, value=1),))
        for _ in range(2):
            result = platform.endpoints.feedback("m", predictions=(GroundTruth(id=ident, value=1),))
        stats = platform.endpoints.stats("m", since=platform.clock() - timedelta(minutes=5))

        assert (nothing.unscored, platform.endpoints.stats("nan").versions[0].labelled) == ((nan,), 0)
        assert (result.stored, result.replaced, stats.scoring) == (1, 1, ScoringRule.LOG_LOSS)
        assert (stats.versions[0].requests, stats.versions[0].labelled) == (1, 1)
        assert platform.endpoints.show("m").unlogged == 0
        assert platform.verify_audit().ok
    assert "monitoring did not take" not in caplog.text


def test_concurrent_reports_are_observed_once_each_on_both_databases(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_platform(tmp_path, database_url, TOML, environment=monkeypatch) as platform:
        for number in (1, 2):
            add_version(platform, tmp_path, "m", number)
        platform.endpoints.deploy("m", model="m@1")
        platform.endpoints.route("m", routes=(Route(version="1"), Route(version="2", weight=10)))
        server = service_caller(platform.parts.gate, MODEL_SERVER, Role.OPERATOR)

        def report(number: int) -> None:
            with acting_as(server):
                platform.endpoints.report("m", counts=(VersionCounts(version="1", requests=number),))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(report, range(1, 21)))
        found = platform.endpoints.observations("m").items

        assert [each.number for each in found] == list(range(1, 21))
        assert sorted(each.requests[0].requests for each in found) == list(range(1, 21))


def test_arrow_of_strangers_is_parsed_in_a_process_of_its_own(platform: OwnPlatform, caller: Caller) -> None:
    platform.endpoints.deploy("rows", model="m@2")
    caller.until("rows", "2")
    sink = pa.BufferOutputStream()
    table = pa.table({"miles": [1.0, 2.0], "riders__trips": [3.0, 4.0]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content = bytes(sink.getvalue())

    good = caller.send("/predict/rows", content, kind=ARROW)
    cut = caller.send("/predict/rows", content[: len(content) // 2], kind=ARROW)
    flipped = [
        caller.send("/predict/rows", content[:at] + b"\xff" + content[at + 1 :], kind=ARROW).status_code
        for at in range(8, len(content), 40)
    ]

    assert good.status_code == 200, good.text
    assert pa.ipc.open_stream(good.content).read_all().to_pylist() == [{"y": 2.0}, {"y": 2.0}]
    assert good.headers["falaj-prediction"]
    assert (cut.status_code, "Arrow" in cut.text or "body" in cut.text) == (400, True), cut.text
    assert set(flipped) <= {200, 400}
    assert (
        caller.send("/predict/rows", b'[{"miles":1,"riders__trips":2}]', kind="application/json").status_code
        == 200
    )


def test_the_index_lists_what_the_gate_lets_the_caller_infer(
    platform: OwnPlatform, caller: Caller, url: str
) -> None:
    platform.endpoints.deploy("listed", model="m@1")
    caller.until("listed", "1")
    secret = platform.tokens.issue(purpose="test", actions=("platform.status",)).secret
    bare = Caller(url, secret)

    index = caller.post("/v2/repository/index").json()
    other = bare.post("/v2/repository/index")
    denied = bare.post("/v2/repository/models/listed/load")
    bare.close()

    assert "listed" in {each["name"] for each in index}
    assert (other.status_code, other.json()) == (200, [])
    assert (denied.status_code, "falaj endpoints deploy" in denied.json()["error"]) == (404, True)
