"""Rules for looked up features without a value: by feature, view and lookup; stale values; ages and counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from math import isnan
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from falaj.errors import InvalidInput
from falaj.records.features import OnlineRow, OnlineRows
from falaj.records.registry import ModelVersion, TensorSpec
from falaj.records.serving.endpoints import Deployment
from falaj.records.serving.lookups import Lookup, ViewLookup
from falaj.serving.lookups.joins import build_join, require_lookup_fits_version
from inference_clients import PROTOCOLS, GrpcClient, InferenceClient, connect
from model_servers import RawClient, RunningServer, deployment, model, request, serving

AGES_S = {"fresh": 5, "old": 7200}


class TwoViews:
    """Trips and account of a customer; "fresh" and "old" say how old the rows are, and "none" has nulls."""

    def read(self, view: str, keys: list[str]) -> OnlineRows:
        now = datetime.now(UTC)
        rows = []
        for key in keys:
            age = AGES_S.get(key)
            event = now - timedelta(seconds=age) if age is not None else (now if key == "none" else None)
            value = float(age) if age is not None else None
            rows.append(OnlineRow(key=key, event_time=event, values=(value,)))
        return OnlineRows(version=1, features=("trips" if view == "trips" else "balance",), rows=tuple(rows))


TRIPS = ViewLookup(view="trips", name="trips", keys=("customer",), features=("trips",))
ACCOUNT = ViewLookup(view="account", name="account", keys=("customer",), features=("balance",))
COLUMNS = ("trips", "balance", "miles")


def echo(path: Path) -> Path:
    """Write a model that returns its input."""
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    onnx.save(model(nodes, {"x": ["n", 3]}, {"y": ["n", 3]}, kind=TensorProto.FLOAT), path)
    return path


LOOKUPS = {
    "by_view": Lookup(
        views=(TRIPS.model_copy(update={"missing": -1.0}), ACCOUNT.model_copy(update={"missing": "reject"})),
        features=COLUMNS,
    ),
    "imputing": Lookup(
        views=(TRIPS, ACCOUNT), features=COLUMNS, missing="impute", imputed={"trips": 3.5, "balance": 100}
    ),
    "aged": Lookup(
        views=(TRIPS.model_copy(update={"max_age": timedelta(hours=1)}), ACCOUNT),
        features=COLUMNS,
        missing=0.0,
    ),
    "optional": Lookup(views=(TRIPS, ACCOUNT), features=COLUMNS, defaults={"miles": 12.0}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = echo(tmp_path_factory.mktemp("models") / "echo.onnx")
    wanted = deployment(*((name, "1", path) for name in LOOKUPS))
    endpoints = tuple(each.model_copy(update={"lookup": LOOKUPS[each.name]}) for each in wanted.endpoints)
    with serving(Deployment(models=wanted.models, endpoints=endpoints), features=TwoViews()) as running:
        yield running


@pytest.fixture(params=PROTOCOLS)
def client(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[InferenceClient]:
    made = connect(request.param, server)
    yield made
    made.close()


def ask(client: InferenceClient, name: str, *customers: str, miles: float | None = 1.0) -> tuple[int, Any]:
    shape = [len(customers)]
    inputs = [{"name": "customer", "shape": shape, "datatype": "BYTES", "data": customers}]
    if miles is not None:
        data = [miles] * len(customers)
        inputs.append({"name": "miles", "shape": shape, "datatype": "FP64", "data": data})
    return client.infer(name, {"inputs": inputs})


def test_each_view_has_its_own_rule(client: InferenceClient) -> None:
    known = ask(client, "by_view", "fresh")
    refused = ask(client, "by_view", "unknown")

    assert known[1]["outputs"][0]["data"] == [5.0, 5.0, 1.0]
    assert refused[0] == 400
    assert "feature balance: given customer 'unknown', which account does not have" in refused[1]["error"]
    assert "trips" not in refused[1]["error"]


def test_stored_values_are_imputed(client: InferenceClient) -> None:
    status, answer = ask(client, "imputing", "unknown", "fresh")

    assert status == 200
    assert answer["outputs"][0]["data"] == [3.5, 100.0, 1.0, 5.0, 5.0, 1.0]
    assert answer["parameters"]["missing_rows"] == 1


def test_values_older_than_allowed_are_missing_with_the_reason(client: InferenceClient) -> None:
    status, answer = ask(client, "aged", "old")

    assert (status, answer["outputs"][0]["data"]) == (200, [0.0, 7200.0, 1.0])
    (gap,) = json.loads(answer["parameters"]["missing_features"])
    assert (gap["view"], gap["reason"], gap["features"]) == ("trips", "stale", ["trips"])


def test_the_answer_has_the_age_of_its_oldest_feature(client: InferenceClient) -> None:
    fresh = ask(client, "imputing", "fresh")[1]["parameters"]
    both = ask(client, "imputing", "fresh", "old")[1]["parameters"]
    none = ask(client, "imputing", "unknown", "none")[1]["parameters"]

    assert 5 <= fresh["feature_age_s"] < 60
    assert 7200 <= both["feature_age_s"] < 7260
    assert "feature_age_s" not in none  # nothing was found


def test_a_feature_of_the_request_with_a_default_may_be_left_out(client: InferenceClient) -> None:
    left_out = ask(client, "optional", "fresh", miles=None)
    given = ask(client, "optional", "fresh", miles=2.0)
    needed = ask(client, "aged", "fresh", miles=None)

    assert left_out[1]["outputs"][0]["data"] == [5.0, 5.0, 12.0]
    assert given[1]["outputs"][0]["data"] == [5.0, 5.0, 2.0]
    assert (needed[0], "input 'miles': given nothing" in needed[1]["error"]) == (400, True)


def test_missing_values_and_ages_are_counted(client: InferenceClient, server: RunningServer) -> None:
    def metrics() -> dict[str, float]:
        with RawClient(server.port) as raw:
            lines = raw.ask(request("GET", "/metrics"))[2].decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    before = metrics()
    ask(client, "aged", "old", "unknown", "none")
    ask(client, "optional", "old", miles=None)
    now = metrics()

    def grown(labels: str, name: str = "missing_features_total") -> float:
        key = f"falaj_serving_{name}{{{labels}}}"
        return now[key] - before.get(key, 0.0)

    assert grown('endpoint="aged",reason="stale",view="trips"') == 1
    assert grown('endpoint="aged",reason="unknown_key",view="trips"') == 1
    assert grown('endpoint="aged",reason="null",view="account"') == 1
    assert grown('endpoint="optional",reason="not_given",view="request"') == 1
    assert grown('endpoint="aged",le="21600.0"', "feature_age_seconds_bucket") == 1
    assert grown('endpoint="aged"', "feature_age_seconds_sum") >= 7200


def test_features_are_looked_up_for_each_message_of_a_stream(server: RunningServer) -> None:
    client = GrpcClient(server)

    def rows(*customers: str) -> dict[str, Any]:
        shape, data = [len(customers)], [1.0] * len(customers)
        keys = {"name": "customer", "shape": shape, "datatype": "BYTES", "data": customers}
        miles = {"name": "miles", "shape": shape, "datatype": "FP64", "data": data}
        return {"inputs": [keys, miles]}

    many = rows(*(("fresh", "unknown") * 500))  # over the size from which features are looked up in a thread
    answers = client.stream("by_view", [rows("fresh"), rows("unknown"), many, rows("fresh")])
    client.close()

    assert answers[0]["outputs"][0]["data"] == answers[3]["outputs"][0]["data"] == [5.0, 5.0, 1.0]
    assert 5 <= answers[0]["parameters"]["feature_age_s"] < 60
    assert all("which account does not have" in words for words in answers[1:3])


def version() -> ModelVersion:
    spec = TensorSpec(name="x", dtype="float32", shape=(-1, 3), features=COLUMNS)
    return ModelVersion.model_construct(name="m", number=1, version=1, inputs=(spec,), reference="m@1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"missing": "impute"}, "no value for trips"),
        ({"missing": "impute", "imputed": {"trips": 1.0, "balance": 1.0, "miles": 1.0}}, "miles"),
        ({"defaults": {"nothing": 1.0}}, "nothing"),
    ],
)
def test_rules_that_cannot_hold_are_refused_at_deployment(change: dict[str, Any], words: str) -> None:
    lookup = Lookup(views=(TRIPS, ACCOUNT), features=COLUMNS, **change)

    with pytest.raises(InvalidInput) as refused:
        require_lookup_fits_version(lookup, version())

    assert words in f"{refused.value.faults}"


def test_the_default_of_a_feature_comes_before_the_rule_of_its_view() -> None:
    view = TRIPS.model_copy(update={"missing": "reject"})
    lookup = Lookup(views=(view, ACCOUNT), features=COLUMNS, missing=7.0, defaults={"trips": 2.0})

    join = build_join(lookup, COLUMNS, version="1")

    assert join.defaults[:2] == (2.0, 7.0)
    assert join.required == frozenset()
    assert isnan(build_join(Lookup(views=(TRIPS,), features=COLUMNS), COLUMNS, version="1").defaults[0])
