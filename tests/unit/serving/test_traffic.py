"""Which version answers: sticky keys, weights, header override and fallback."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from math import erfc, sqrt
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from tritonclient.grpc import service_pb2, service_pb2_grpc

from falaj.records.serving.endpoints import Deployment, Route
from falaj.serving.routing import WeightedRouter
from inference_clients import PROTOCOLS, GrpcClient, InferenceClient, connect
from model_servers import TOKEN, RawClient, RunningServer, constant, deployment, model, request, serving
from polling import PATIENCE_S


def router(*weights: int, name: str = "churn") -> WeightedRouter:
    return WeightedRouter(
        [Route(version=str(number), weight=weight) for number, weight in enumerate(weights, 1)], name=name
    )


def moved(one: WeightedRouter, other: WeightedRouter, keys: range) -> Counter[tuple[str, str]]:
    pairs = ((one.choose(f"k{key}"), other.choose(f"k{key}")) for key in keys)
    return Counter(pair for pair in pairs if pair[0] != pair[1])


# ------------------------------------------------------------------------------------------- sticky keys


@pytest.mark.parametrize("weights", [(90, 10), (1, 1), (50, 30, 20), (999, 1), (100, 0, 100)])
def test_the_shares_of_many_keys_are_those_of_the_weights(weights: tuple[int, ...]) -> None:
    chooses, total, keys = router(*weights), sum(weights), 50_000

    found = Counter(chooses.choose(f"customer-{key}") for key in range(keys))

    for number, weight in enumerate(weights, 1):
        share = weight / total
        assert abs(found[str(number)] / keys - share) <= 4 * sqrt(share * (1 - share) / keys)


def test_a_key_gets_the_same_version_in_every_process() -> None:
    code = (
        "from falaj.serving.routing import WeightedRouter; from falaj.records.serving.endpoints import Route\n"
        "r = WeightedRouter([Route(version='1', weight=70), Route(version='2', weight=30)], name='churn')\n"
        "print(''.join(r.choose(f'k{n}') for n in range(300)))"
    )

    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    here = "".join(router(70, 30).choose(f"k{number}") for number in range(300))
    assert other.strip() == here
    assert here.startswith("1111212111111212112211")


def test_as_few_keys_as_possible_move_when_weights_change() -> None:
    keys = range(20_000)

    grown = moved(router(90, 10), router(80, 20), keys)
    added = moved(router(50, 50, 0), router(40, 40, 20), keys)
    scaled = moved(router(90, 10), router(9, 1), keys)

    assert set(grown) == {("1", "2")}
    assert abs(sum(grown.values()) / len(keys) - 0.10) < 0.01
    assert {pair[1] for pair in added} == {"3"}
    assert abs(sum(added.values()) / len(keys) - 0.20) < 0.015
    assert not scaled


def test_equal_versions_show_no_difference_in_an_a_a_test() -> None:
    """Outcomes that depend on nothing but the key: of 400 A/A tests, about 5 % are significant at 5 %."""
    significant = 0
    for number in range(400):
        chooses, chance = router(50, 50, name=f"endpoint-{number}"), random.Random(number)
        outcomes: dict[str, list[float]] = {"1": [], "2": []}
        for key in range(300):
            outcomes[chooses.choose(f"customer-{key}")].append(chance.gauss(0, 1))
        one, two = outcomes["1"], outcomes["2"]
        apart = sum(one) / len(one) - sum(two) / len(two)
        significant += erfc(abs(apart) / sqrt(1 / len(one) + 1 / len(two)) / sqrt(2)) < 0.05

    assert 6 <= significant <= 36  # 20 are expected; 4 standard deviations to each side


def test_endpoints_divide_the_same_keys_independently() -> None:
    one, two = router(50, 50, name="one"), router(50, 50, name="two")

    both = Counter((one.choose(f"k{n}"), two.choose(f"k{n}")) for n in range(20_000))

    assert all(abs(count / 20_000 - 0.25) < 0.015 for count in both.values())


@given(st.text(min_size=1), st.lists(st.integers(0, 1000), min_size=2, max_size=6).filter(any))
def test_every_key_gets_a_version_with_a_weight(key: str, weights: list[int]) -> None:
    chosen = router(*weights).choose(key)

    assert weights[int(chosen) - 1] > 0


# --------------------------------------------------------------------------------------------- requests


def picky(path: Path) -> Path:
    """Write a model that fails where its input is not a valid index, after its rows were checked."""
    weights = {"table": np.arange(2, dtype="int64")}
    nodes = [helper.make_node("Gather", ["table", "x"], ["y"])]
    onnx.save(model(nodes, {"x": ["n"]}, {"y": ["n"]}, weights=weights), path)
    return path


def doubling(path: Path) -> Path:
    onnx.save(model([helper.make_node("Add", ["x", "x"], ["y"])], {"x": ["n"]}, {"y": ["n"]}), path)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    names = ("header", "parameter", "input", "shaded")
    files = [(name, v, constant(folder / f"{v}.onnx", float(v))) for name in names for v in "123"]
    files += [("frail", "1", picky(folder / "picky.onnx")), ("frail", "2", doubling(folder / "d.onnx"))]
    wanted = deployment(*files, weights={"1": 50, "2": 50, "3": 0})
    sticky = {"header": "header", "parameter": "parameter:customer", "input": "input:x"}
    shaded = (Route(version="1"), Route(version="2", weight=0), Route(version="3", weight=0, shadow=100))
    frail = (Route(version="1"), Route(version="2", weight=0, fallback=True))
    routes = {"shaded": shaded, "frail": frail}
    endpoints = [
        each.model_copy(
            update={"sticky": sticky.get(each.name), "routes": routes.get(each.name, each.routes)}
        )
        for each in wanted.endpoints
    ]
    with serving(Deployment(models=wanted.models, endpoints=tuple(endpoints))) as running:
        yield running


@pytest.fixture(params=PROTOCOLS)
def client(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[InferenceClient]:
    made = connect(request.param, server)
    yield made
    made.close()


def metrics(server: RunningServer) -> dict[str, float]:
    with RawClient(server.port) as client:
        lines = client.ask(request("GET", "/metrics"))[2].decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def rows(*values: float, **more: Any) -> dict[str, Any]:
    data = [each for value in values for each in (value, value)]
    tensor = {"name": "x", "shape": [len(values), 2], "datatype": "FP32", "data": data}
    return {"inputs": [tensor], **more}


def whole(*values: int) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [len(values)], "datatype": "INT64", "data": values}]}


def chosen_version(client: InferenceClient, name: str, content: dict[str, Any], **headers: str) -> str:
    status, answer = client.infer(name, content, **headers)
    assert status == 200, answer
    return str(answer["model_version"])


def test_one_key_gets_one_version_wherever_it_is(client: InferenceClient) -> None:
    def of(key: int) -> list[set[str]]:
        return [
            {chosen_version(client, "header", rows(1), Falaj_Key=f"{key}") for _ in range(3)},
            {chosen_version(client, "parameter", rows(1, parameters={"customer": key})) for _ in range(3)},
            {chosen_version(client, "input", rows(key, key)) for _ in range(3)},
        ]

    found = [of(key) for key in range(20)]

    assert all(len(each) == 1 for every in found for each in every)
    for place in range(3):
        assert {next(iter(every[place])) for every in found} == {"1", "2"}


def test_a_number_is_the_same_key_in_every_type(client: InferenceClient) -> None:
    for key in range(20):
        spelled = [key, float(key), str(key)]

        found = {
            chosen_version(client, "parameter", rows(1, parameters={"customer": each})) for each in spelled
        }

        assert len(found) == 1


def test_requests_without_the_key_are_divided_by_id_or_by_turns(client: InferenceClient) -> None:
    by_id = {chosen_version(client, "header", rows(1, id="order-7")) for _ in range(6)}
    by_turns = Counter(chosen_version(client, "header", rows(1)) for _ in range(10))

    assert len(by_id) == 1
    assert by_turns == {"1": 5, "2": 5}


def test_rows_with_several_keys_are_refused(client: InferenceClient) -> None:
    status, answer = client.infer("input", rows(1, 2))

    assert status == 400
    assert "several keys: 1, 2, allowed one" in answer["error"]


@pytest.mark.parametrize(
    ("name", "content", "headers"),
    [
        ("header", rows(1), {"Falaj_Key": "k" * 1025}),
        ("parameter", rows(1, parameters={"customer": "k" * 1025}), {}),
        ("input", rows(*range(10_001)), {}),
    ],
)
def test_keys_that_are_too_long_are_refused(
    client: InferenceClient, name: str, content: dict[str, Any], headers: dict[str, str]
) -> None:
    status, answer = client.infer(name, content, **headers)

    assert (status, "allowed" in answer["error"]) == (400, True)


KEYS_THAT_CANNOT_BE = [("FP32", [99999, 99999]), ("FP32", [-1, -2]), ("FP99", [1, 2]), ("FP32", [1, 2])]


@pytest.mark.parametrize(("datatype", "shape"), KEYS_THAT_CANNOT_BE)
def test_keys_that_cannot_be_are_refused(server: RunningServer, datatype: str, shape: list[int]) -> None:
    """By REST, and by gRPC in messages that the client of Triton does not send."""
    tensor = {"name": "x", "shape": shape, "datatype": datatype}
    message = service_pb2.ModelInferRequest(model_name="input", inputs=[tensor])
    message.raw_input_contents.append(b"odd")

    with RawClient(server.port) as client:
        sent = json.dumps({"inputs": [{**tensor, "data": "x"}]}).encode()
        status, _, answer = client.ask(request(path="/v2/models/input/infer", body=sent))
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(message, metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=PATIENCE_S)

    assert (status, json.loads(answer)["code"]) == (400, "input.invalid")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_header_names_the_version_also_with_weight_0(client: InferenceClient) -> None:
    chosen = [chosen_version(client, "header", rows(1), Falaj_Version=each) for each in "123"]
    with_path = client.infer("header", rows(1), version="2", Falaj_Version="2")

    assert chosen == ["1", "2", "3"]
    assert with_path[0] == 200


def test_a_header_names_routed_versions_only(client: InferenceClient) -> None:
    unknown = client.infer("header", rows(1), Falaj_Version="9")
    other = client.infer("header", rows(1), version="1", Falaj_Version="2")

    assert unknown[0] == 404
    assert "given '9', allowed a routed version of header: 1, 2, 3" in unknown[1]["error"]
    assert other[0] == 400


def test_a_version_that_is_named_twice_is_refused(server: RunningServer) -> None:
    twice = [("authorization", f"Bearer {TOKEN}"), ("falaj-version", "1"), ("falaj-version", "2")]
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32"}
    message = service_pb2.ModelInferRequest(model_name="header", inputs=[tensor])
    message.raw_input_contents.append(b"\0" * 8)

    with RawClient(server.port) as client:
        sent = json.dumps(rows(1)).encode()
        by_rest = client.ask(
            request(path="/v2/models/header/infer", body=sent, Falaj_Version="1\r\nFalaj-Version: 2")
        )
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(message, metadata=twice, timeout=PATIENCE_S)

    assert by_rest[0] == 400
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "falaj-version is given twice" in refused.value.details()


def test_a_shadow_never_answers(client: InferenceClient, server: RunningServer) -> None:
    with RawClient(server.port) as raw:
        about = json.loads(raw.ask(request("GET", "/v2/models/shaded"))[2])

    assert about["versions"] == ["1", "2"]
    assert client.infer("shaded", rows(1), Falaj_Version="3")[0] == 404
    assert client.infer("shaded", rows(1), version="3")[0] == 404


# --------------------------------------------------------------------------------------------- fallback


def test_the_fallback_answers_where_the_chosen_version_fails(
    client: InferenceClient, server: RunningServer
) -> None:
    before = metrics(server)
    fine = client.infer("frail", whole(1))
    failed = client.infer("frail", whole(7))

    assert (fine[1]["model_version"], "parameters" in fine[1]) == ("1", False)
    assert (failed[0], failed[1]["model_version"], failed[1]["outputs"][0]["data"]) == (200, "2", [14])
    assert failed[1]["parameters"] == {"fallback_from": "1", "fallback_reason": "input.invalid"}
    now = metrics(server)
    for key in (
        'falaj_serving_fallbacks_total{endpoint="frail",reason="input.invalid",version="1"}',
        'falaj_serving_requests_total{endpoint="frail",status="400",version="1"}',
    ):
        assert now[key] == before.get(key, 0) + 1


def test_a_version_that_was_asked_for_has_no_fallback(client: InferenceClient) -> None:
    assert client.infer("frail", whole(7), Falaj_Version="1")[0] == 400
    assert client.infer("frail", whole(7), version="1")[0] == 400


def test_an_overloaded_version_has_a_fallback(
    client: InferenceClient, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from falaj.errors import Unavailable
    from falaj.serving.runtime.batch_queue import BatchQueue

    plain = BatchQueue.submit

    def full(self: BatchQueue, request: Any) -> None:
        if (self.model.name, self.model.version) == ("frail", "1"):
            raise Unavailable("the queue is full")
        plain(self, request)

    monkeypatch.setattr(BatchQueue, "submit", full)

    status, answer = client.infer("frail", whole(1))

    assert (status, answer["model_version"]) == (200, "2")
    assert answer["parameters"]["fallback_reason"] == "service.unavailable"


# ---------------------------------------------------------------------------------------------- streams


def test_the_messages_of_a_stream_are_divided_each_by_its_own_key(server: RunningServer) -> None:
    client = GrpcClient(server)
    contents = [rows(1, parameters={"customer": key}) for key in range(12)] * 2

    answers = client.stream("parameter", contents)
    alone = [chosen_version(client, "parameter", content) for content in contents]
    client.close()

    assert [answer["model_version"] for answer in answers] == alone
    assert set(alone) == {"1", "2"}


def test_the_metadata_of_a_stream_holds_for_its_messages(server: RunningServer) -> None:
    client = GrpcClient(server)

    named = client.stream("header", [rows(1)] * 4, Falaj_Version="3")
    keyed = client.stream("header", [rows(1)] * 4, Falaj_Key="customer-7")
    unknown = client.stream("header", [rows(1)], Falaj_Version="9")
    client.close()

    assert [answer["model_version"] for answer in named] == ["3"] * 4
    assert len({answer["model_version"] for answer in keyed}) == 1
    assert "given '9', allowed a routed version" in unknown[0]


def test_the_fallback_answers_single_messages_of_a_stream_in_their_place(server: RunningServer) -> None:
    client = GrpcClient(server)

    answers = client.stream("frail", [whole(value) for value in (1, 7, 0, 9)])
    client.close()

    assert [answer["model_version"] for answer in answers] == ["1", "2", "1", "2"]
    assert [answer["outputs"][0]["data"] for answer in answers] == [[1], [14], [0], [18]]
    assert answers[1]["parameters"]["fallback_from"] == "1"
