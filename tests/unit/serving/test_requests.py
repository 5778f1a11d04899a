"""Raw inference requests: accepted JSON, rejected requests and their errors, and robustness of the server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from falaj.errors import Conflict
from falaj.records.features import OnlineRow, OnlineRows
from falaj.records.serving.endpoints import Deployment
from falaj.records.serving.lookups import Lookup, ViewLookup
from falaj.serving.dependencies import PredictedBatch
from model_servers import RawClient, RunningServer, constant, deployment, model, request, serving, tabular

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Passengers:
    """Two features of two passengers, and a route that is not known yet."""

    def read(self, view: str, keys: list[str]) -> OnlineRows:
        if view == "offline":
            raise Conflict("view offline is not online")
        known = {"7": (1.0, 2), "8": (3.0, None), "a\\|b|c": (5.0, 6), **WHOLE}
        rows = (
            OnlineRow(key=key, event_time=NOON if key in known else None, values=known.get(key, (None, None)))
            for key in keys
        )
        return OnlineRows(version=1, features=("age", "bags"), rows=tuple(rows))


WHOLE = {
    "largest": (2**53 + 1, 2**63 - 1),
    "fraction": (1.5, 1),
    "endless": (float("inf"), 1),
    "too-large": (1e19, 1),
}
"""What passengers have for a model that takes integers."""


class Kept:
    """A log that keeps batches, or fails if configured."""

    def __init__(self) -> None:
        self.batches: list[PredictedBatch] = []
        self.fails = False

    def next_id(self, endpoint: str, version: str) -> str:
        return f"{endpoint}-{len(self.batches)}"

    def add(self, batch: PredictedBatch) -> None:
        if self.fails:
            raise OSError("the disk is full")
        self.batches.append(batch)


LOOKING = ("looked", "mixed", "pairs", "offline", "strict")


def whole_numbers(path: Path) -> Path:
    """Write a model whose input cannot be NaN."""
    onnx.save(model([helper.make_node("Identity", ["x"], ["y"])], {"x": ["n", 2]}, {"y": ["n", 2]}), path)
    return path


@pytest.fixture(scope="module")
def log() -> Kept:
    return Kept()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, log: Kept) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    wanted = deployment(
        ("m", "1", constant(folder / "m.onnx", 1)),
        ("t", "1", tabular(folder / "t.onnx")),
        *((name, "1", constant(folder / "l.onnx", 5)) for name in LOOKING),
        ("whole", "1", whole_numbers(folder / "w.onnx")),
    )
    seen = ("age", "bags")
    person = ViewLookup(view="passengers", name="p", keys=("passenger",), features=seen)
    lookups = {
        "looked": Lookup(views=(person,), features=("p__age", "bags")),
        "mixed": Lookup(views=(person,), features=("bags", "miles"), missing=-1),
        "pairs": Lookup(views=(person.model_copy(update={"keys": ("from", "to")}),), features=seen),
        "offline": Lookup(views=(person.model_copy(update={"view": "offline"}),), features=seen),
        "strict": Lookup(views=(person,), features=seen, missing="reject", defaults={"bags": 9}),
        "whole": Lookup(views=(person,), features=seen),
    }
    endpoints = [e.model_copy(update={"lookup": lookups.get(e.name)}) for e in wanted.endpoints]
    with serving(
        Deployment(models=wanted.models, endpoints=tuple(endpoints)), features=Passengers(), sink=log
    ) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    with RawClient(server.port) as made:
        yield made


def x(data: Any, shape: Any = (1, 2), datatype: str = "FP32", **more: Any) -> bytes:
    return json.dumps(
        {"inputs": [{"name": "x", "shape": shape, "datatype": datatype, "data": data, **more}]}
    ).encode()


@pytest.mark.parametrize("data", [[1.5, 2], [[1.5, 2]], [1, 2], [1e10, -0.0]])
def test_numbers_come_flat_or_nested(client: RawClient, data: Any) -> None:
    status, _, body = client.ask(request(body=x(data)))

    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [1.0])


BAD = {
    b"": "not an inference request",
    b"{": "not an inference request",
    b"[]": "not an inference request",
    b'{"inputs": 3}': "not an inference request",
    b'{"inputs": []}': "input 'x': given nothing, allowed FP32 [-1, 2]",
    b"\xff\xfe": "not an inference request",
    x(["1", "2"]): "Expected `float`, got `str`",
    x([True, False]): "Expected `float`, got `bool`",
    x([None, 1]): "Expected `float`, got `null`",
    x([1]): "1 values, where the shape needs 2",
    x([1, 2, 3]): "3 values, where the shape needs 2",
    x([[1, 2, 3]]): "nested lists that do not match the shape",
    x([[1], [2]]): "nested lists that do not match the shape",
    x([[[1, 2]]]): "nested lists that do not match the shape",
    x([["1", "2"]]): "Expected `float`, got `str`",
    b"[" * 100_000: "not an inference request",
    x([])[:-4] + b"[" * 100_000: "not an inference request",
    x([])[:-4] + b"[" * 499 + b"]" * 500 + b"}]}": "nested lists that do not match the shape",
    x([1e300, 0]): "too large",
    x([], shape=[2, 0]): "given shape [2, 0]",
    x([1, 2], shape=[-1, 2]): "given shape [-1, 2]",
    x([1, 2], shape=[2**62, 2]): "2 values, where the shape needs",
    x([1, 2], datatype="FLOAT"): "given datatype FLOAT, allowed FP32",
    x([1, 2], parameters={"shared_memory_region": "r"}): "shared_memory_region is not supported",
    x([1, 2], parameters={"binary_data_size": 8}): "given binary_data_size 8",
    x([1, 2], parameters={"binary_data_size": "8"}): "given binary_data_size",
    x([1, 2])[:-2] + b',{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}': "given a duplicate",
    x([1, 2])[:-1]
    + b',"outputs":[{"name":"q"}]}': "output 'q': given an unknown name, allowed the outputs y",
}


@pytest.mark.parametrize(("body", "words"), BAD.items())
def test_an_invalid_request_is_explained_and_the_connection_stays_open(
    client: RawClient, body: bytes, words: str
) -> None:
    status, _, answer = client.ask(request(body=body))

    assert status == 400
    assert words in json.loads(answer)["error"]
    assert client.ask(request(body=x([1, 2])))[0] == 200


@pytest.mark.parametrize("length", ["9999999", "-1", "many", "9" * 30])
def test_a_wrong_json_length_is_refused(client: RawClient, length: str) -> None:
    status, _, _ = client.ask(request(body=x([1, 2]), Inference_Header_Content_Length=length))

    assert status == 400


def test_an_output_is_given_once(client: RawClient) -> None:
    """Otherwise a small request could demand more bytes than the server has."""
    wanted = [{"name": "y"}] * 4000

    status, _, answer = client.ask(
        request(body=json.dumps({**json.loads(x([1, 2])), "outputs": wanted}).encode())
    )

    assert (status, json.loads(answer)["error"]) == (
        400,
        "output 'y': given a duplicate, allowed each output once",
    )


TINY = b'{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}'
HOSTILE = {
    "duplicate inputs": b'{"inputs":[%b]}' % b",".join([TINY] * 100_000),
    "tiny inputs": b'{"inputs":[%b]}' % b",".join([b'{"name":"","shape":[],"datatype":""}'] * 400_000),
    "outputs": b'{"inputs":[%b],"outputs":[%b]}' % (TINY, b",".join([b'{"name":"y"}'] * 400_000)),
    "dimensions": x([1, 2], shape=[2**62] * 500_000),
    "empty lists": x([])[:-4] + b"[%b]}]}" % b",".join([b"[]"] * 5_000_000),
    "parameters": b'{"parameters":{"a":[%b]},"inputs":[%b]}' % (b",".join([b"[]"] * 5_000_000), TINY),
    "digits": x([1, 2], shape=[])[:-2] + b'},{"shape":[%b' % (b"9" * 8_000_000),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_body_of_many_parts_is_refused_before_they_are_made(client: RawClient, what: str) -> None:
    began = time.process_time()

    status, _, answer = client.ask(request(body=HOSTILE[what]))

    assert status == 400
    assert len(answer) < 1000
    assert time.process_time() - began < 3


def test_faults_of_many_inputs_are_not_all_listed(client: RawClient) -> None:
    body = b'{"inputs":[%b]}' % b",".join([b'{"name":"q","shape":[1],"datatype":"FP32"}'] * 4000)

    status, _, answer = client.ask(request(body=body))

    assert status == 400
    assert len(answer) < 10_000


def test_the_id_of_a_request_is_short(client: RawClient) -> None:
    """It is kept in memory until its batch is logged."""
    body = json.loads(x([1, 2]))

    longest, _, _ = client.ask(request(body=json.dumps({**body, "id": "a" * 256}).encode()))
    status, _, answer = client.ask(request(body=json.dumps({**body, "id": "a" * 257}).encode()))

    assert (longest, status) == (200, 400)
    assert json.loads(answer)["error"] == "id: given 257 characters, allowed at most 256"


def test_all_faults_are_reported_at_once(client: RawClient) -> None:
    body = {
        "inputs": [
            {"name": "amount", "shape": [2], "datatype": "FP32", "data": [1, 2]},
            {"name": "kind", "shape": [2], "datatype": "INT64", "data": [1, 2]},
        ]
    }

    _, _, answer = client.ask(request(path="/v2/models/t/infer", body=json.dumps(body).encode()))

    error = json.loads(answer)["error"]
    assert "input 'amount': given datatype FP32, allowed FP64" in error
    assert "input 'kind': given an unknown name" in error
    assert "input 'category': given nothing, allowed INT64 [-1]" in error


def test_inputs_must_have_the_same_number_of_rows(client: RawClient) -> None:
    status, _, answer = client.ask(request(path="/v2/models/t/infer", body=scores([1.0, 2.0], [1])))

    assert status == 400
    assert b"different numbers of rows: given amount [2], category [1]" in answer


def test_values_that_the_model_refuses_fail_no_other_request(server: RunningServer) -> None:
    bad, good = scores([1.0], [99]), scores([1.0], [1])

    with RawClient(server.port) as client:
        client.send(b"".join(request(path="/v2/models/t/infer", body=b) for b in (good, bad, good)))
        statuses = [client.answer()[0] for _ in range(3)]

    assert statuses == [200, 400, 200]


def test_paths_and_methods(client: RawClient) -> None:
    assert client.ask(request("GET", "/nothing"))[0] == 404
    assert client.ask(request("GET", "/v2/models/m/infer"))[0] == 405
    assert client.ask(request("POST", "/v2/models/m"))[0] == 405
    assert client.ask(request("GET", "/v2/models/m/versions/9"))[0] == 404
    assert client.ask(request("GET", "/v2/models/%6D?a=b"))[0] == 200
    status, headers, _ = client.ask(request("GET", "/metrics"))
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4")


def test_metrics_count_by_status(client: RawClient) -> None:
    client.ask(request(body=x([1, 2])))
    client.ask(request(body=b"{"))

    _, _, text = client.ask(request("GET", "/metrics"))

    assert b'falaj_serving_requests_total{endpoint="m",status="200",version="1"}' in text
    assert b'falaj_serving_requests_total{endpoint="m",status="400",version=""}' in text
    assert b'falaj_serving_batches_total{model="m",version="1"}' in text


def named(*inputs: tuple[str, str, list[Any]]) -> bytes:
    tensors = [{"name": n, "shape": [len(data)], "datatype": t, "data": data} for n, t, data in inputs]
    return json.dumps({"inputs": tensors}).encode()


def looked_up(client: RawClient, endpoint: str, body: bytes, log: Kept) -> Any:
    status, _, answer = client.ask(request(path=f"/v2/models/{endpoint}/infer", body=body))

    assert status == 200, answer
    return np.nan_to_num(log.batches[-1].inputs[0], nan=-99).tolist()


@pytest.mark.parametrize(("keys", "datatype"), [([7, 8], "INT64"), (["7", "8"], "BYTES")])
def test_features_are_looked_up_by_key(client: RawClient, log: Kept, keys: Any, datatype: str) -> None:
    body = named(("passenger", datatype, keys))

    assert looked_up(client, "looked", body, log) == [[1.0, 2.0], [3.0, -99.0]]


def test_views_and_the_request_are_joined_in_the_order_of_the_model(client: RawClient, log: Kept) -> None:
    body = named(("miles", "INT64", [10, 20, 30]), ("passenger", "BYTES", ["7", "8", "nobody"]))

    assert looked_up(client, "mixed", body, log) == [[2.0, 10.0], [-1.0, 20.0], [-1.0, 30.0]]


def test_a_key_of_several_columns_is_spelled_as_the_store_does(client: RawClient, log: Kept) -> None:
    assert looked_up(client, "pairs", named(("to", "BYTES", ["c"]), ("from", "BYTES", ["a|b"])), log) == [
        [5, 6]
    ]


def test_the_answer_says_which_feature_of_which_row_is_missing(client: RawClient) -> None:
    body = named(("passenger", "BYTES", ["7", "8", "nobody"]))[:-1] + b',"id":"mine"}'

    status, _, answer = client.ask(request(path="/v2/models/looked/infer", body=body))

    found = json.loads(answer)
    assert status == 200
    assert json.loads(found["parameters"]["missing_features"]) == [
        {"row": 1, "view": "p", "key": "8", "reason": "null", "features": ["bags"]},
        {"row": 2, "view": "p", "key": "nobody", "reason": "unknown_key", "features": ["p__age", "bags"]},
    ]
    assert found["parameters"]["missing_rows"] == 2
    assert found["parameters"]["prediction"].startswith("looked-")
    assert b'"data":[5.0,NaN,NaN]' in answer
    assert "parameters" not in found["outputs"][0]


def test_of_many_missing_rows_the_first_are_listed_and_all_are_counted(client: RawClient) -> None:
    body = named(("passenger", "INT64", list(range(1_000, 3_000))))

    _, _, answer = client.ask(request(path="/v2/models/looked/infer", body=body))

    parameters = json.loads(answer)["parameters"]
    assert len(json.loads(parameters["missing_features"])) == 50
    assert parameters["missing_rows"] == 2_000


def test_a_complete_row_has_no_notes_but_its_age(client: RawClient) -> None:
    _, _, answer = client.ask(
        request(path="/v2/models/looked/infer", body=named(("passenger", "BYTES", ["7"])))
    )

    assert json.loads(answer)["parameters"].keys() == {"feature_age_s"}
    assert "parameters" not in json.loads(answer)["outputs"][0]


def test_an_endpoint_may_reject_rows_without_a_feature(client: RawClient, log: Kept) -> None:
    body = named(("passenger", "BYTES", ["7", "nobody"]))

    status, _, answer = client.ask(request(path="/v2/models/strict/infer", body=body))
    bags = looked_up(client, "strict", named(("passenger", "BYTES", ["7", "8"])), log)

    words = "row 1, feature age: given passenger 'nobody', which p does not have"
    assert (status, words in json.loads(answer)["error"]) == (400, True), answer
    assert bags == [[1.0, 2.0], [3.0, 9.0]]  # bags have a default


def test_a_model_of_whole_numbers_gets_no_nan(client: RawClient) -> None:
    """NaN would become the smallest integer without a word."""
    status, _, answer = client.ask(
        request(path="/v2/models/whole/infer", body=named(("passenger", "BYTES", ["8"])))
    )

    assert status == 400
    assert "row 0, feature bags: given passenger '8', whose value in p is null" in json.loads(answer)["error"]


def test_a_model_of_whole_numbers_gets_each_as_it_is(client: RawClient) -> None:
    """A double holds integers up to 2**53 only."""
    body = named(("passenger", "BYTES", ["largest", "7"]))

    status, _, answer = client.ask(request(path="/v2/models/whole/infer", body=body))

    assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [2**53 + 1, 2**63 - 1, 1, 2])


@pytest.mark.parametrize(("key", "given"), [("fraction", "1.5"), ("endless", "inf"), ("too-large", "1e+19")])
def test_a_model_of_whole_numbers_gets_nothing_else(client: RawClient, key: str, given: str) -> None:
    body = named(("passenger", "BYTES", ["7", key]))

    status, _, answer = client.ask(request(path="/v2/models/whole/infer", body=body))

    words = f"row 1, feature age: given {given}, allowed a whole number that INT64 holds"
    assert (status, words in json.loads(answer)["error"]) == (400, True), answer


def test_a_request_with_all_inputs_needs_no_lookup(client: RawClient, log: Kept) -> None:
    assert looked_up(client, "looked", x([8, 9]), log) == [[8.0, 9.0]]


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "words"),
    [
        ("looked", named(("who", "BYTES", ["7"])), 400, "input 'passenger': given nothing, allowed a key"),
        ("looked", named(("passenger", "FP32", [7.0])), 400, "datatype FP32, allowed text or whole numbers"),
        (
            "mixed",
            named(("passenger", "BYTES", ["7"])),
            400,
            "input 'miles': given nothing, allowed a feature",
        ),
        (
            "mixed",
            named(("passenger", "BYTES", ["7"]), ("miles", "BYTES", ["7"])),
            400,
            "input 'miles': given datatype BYTES, allowed numbers",
        ),
        (
            "mixed",
            named(("passenger", "BYTES", ["7"]), ("miles", "FP32", [1, 2])),
            400,
            "the same number of rows in each",
        ),
        ("offline", named(("passenger", "BYTES", ["7"])), 409, "not online"),
    ],
)
def test_a_lookup_that_cannot_be_made_is_explained(
    client: RawClient, endpoint: str, body: bytes, status: int, words: str
) -> None:
    found, _, answer = client.ask(request(path=f"/v2/models/{endpoint}/infer", body=body))

    assert (found, words in json.loads(answer)["error"]) == (status, True), answer


def test_an_answer_has_its_prediction_id(client: RawClient) -> None:
    _, headers, body = client.ask(request(body=x([1, 2])))
    _, own_headers, own = client.ask(request(body=x([1, 2])[:-1] + b',"id":"mine"}'))

    assert json.loads(body)["id"] == headers["falaj-prediction"]
    assert (json.loads(own)["id"], json.loads(own)["parameters"]["prediction"]) == (
        "mine",
        own_headers["falaj-prediction"],
    )


def test_predictions_are_logged_with_their_caller(client: RawClient, log: Kept) -> None:
    body = x([1, 2])[:-1] + b',"id":"r-1"}'

    client.ask(request(body=body))

    batch = log.batches[-1]
    assert (batch.endpoint, batch.requests, batch.callers, batch.counts) == ("m", ("r-1",), ("tester",), [1])
    assert (batch.model.version, batch.outputs[0].tolist()) == ("1", [[1.0]])


def test_a_log_that_fails_costs_no_answer(server: RunningServer, client: RawClient, log: Kept) -> None:
    log.fails = True
    try:
        assert client.ask(request(body=x([1, 2])))[0] == 200
        assert client.ask(request(body=x([1, 2])))[0] == 200
    finally:
        log.fails = False

    assert server.server.metrics.unlogged >= 1


def scores(amounts: list[float], categories: list[int]) -> bytes:
    return json.dumps(
        {
            "inputs": [
                {"name": "amount", "shape": [len(amounts)], "datatype": "FP64", "data": amounts},
                {"name": "category", "shape": [len(categories)], "datatype": "INT64", "data": categories},
            ]
        }
    ).encode()
