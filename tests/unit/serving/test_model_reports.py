"""Triton's extensions that its clients call: configuration, statistics, repository index, load and unload."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from model_servers import (
    TOKEN,
    RawClient,
    RunningServer,
    centred,
    constant,
    deployment,
    request,
    serving,
    tabular,
)

BODY = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'


def headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    wanted = deployment(
        ("m", "1", constant(tmp_path / "one.onnx", 1)),
        ("m", "2", constant(tmp_path / "two.onnx", 2)),
        ("t", "1", tabular(tmp_path / "t.onnx")),
        ("centred", "1", centred(tmp_path / "c.onnx")),
        ("forbidden", "1", constant(tmp_path / "three.onnx", 3)),
    )
    with serving(wanted) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as made:
        yield made


def infer(client: triton.InferenceServerClient, rows: int, **more: Any) -> None:
    tensor = triton.InferInput("x", [rows, 2], "FP32")
    tensor.set_data_from_numpy(np.zeros((rows, 2), np.float32))
    client.infer("m", [tensor], headers=headers(), **more)


def test_the_configuration_names_tensors_and_the_largest_batch(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("m", headers=headers())
    scores = client.get_model_config("t", "1", headers=headers())
    dependent = client.get_model_config("centred", headers=headers())

    assert (config["name"], config["platform"], config["backend"], config["max_batch_size"]) == (
        *("m", "onnxruntime_onnx", "onnxruntime", 32),
    )
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}]
    assert [each["data_type"] for each in scores["output"]] == ["TYPE_FP64", "TYPE_BOOL"]
    assert scores["version_policy"] == {"specific": {"versions": ["1"]}}
    assert (dependent["max_batch_size"], dependent["input"][0]["dims"]) == (0, [-1, 2])


def test_statistics_count_requests_rows_and_runs(client: triton.InferenceServerClient) -> None:
    infer(client, 1, model_version="1")
    infer(client, 3, model_version="1")
    infer(client, 3, model_version="1")

    (found,) = client.get_inference_statistics("m", "1", headers=headers())["model_stats"]
    both = client.get_inference_statistics("m", headers=headers())["model_stats"]

    assert (found["name"], found["version"]) == ("m", "1")
    assert (found["inference_count"], found["execution_count"]) == (7, 3)
    assert found["inference_stats"]["success"]["count"] == 3
    assert found["inference_stats"]["success"]["ns"] >= found["inference_stats"]["compute_infer"]["ns"] > 0
    assert [(each["batch_size"], each["compute_infer"]["count"]) for each in found["batch_stats"]] == [
        *((1, 1), (3, 2)),
    ]
    assert found["last_inference"] > 1_700_000_000_000
    assert [each["version"] for each in both] == ["1", "2"]


def test_statistics_count_failures(client: triton.InferenceServerClient) -> None:
    tensors = [triton.InferInput("amount", [1], "FP64"), triton.InferInput("category", [1], "INT64")]
    tensors[0].set_data_from_numpy(np.array([1.0]))
    tensors[1].set_data_from_numpy(np.array([99]))
    with pytest.raises(InferenceServerException):
        client.infer("t", tensors, headers=headers())

    (found,) = client.get_inference_statistics("t", headers=headers())["model_stats"]

    assert (found["inference_count"], found["inference_stats"]["fail"]["count"]) == (0, 1)
    assert found["execution_count"] == 0


def test_only_endpoints_that_the_caller_may_call_are_listed(client: triton.InferenceServerClient) -> None:
    index = client.get_model_repository_index(headers=headers())
    statistics = client.get_inference_statistics(headers=headers())["model_stats"]

    assert [(each["name"], each["version"], each["state"]) for each in index] == [
        *(("m", "1", "READY"), ("m", "2", "READY"), ("t", "1", "READY"), ("centred", "1", "READY")),
    ]
    assert {each["name"] for each in statistics} == {"m", "t", "centred"}


def test_loading_a_served_model_succeeds_and_changes_nothing(client: triton.InferenceServerClient) -> None:
    client.load_model("m", headers=headers())

    infer(client, 1)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("models/nothing/load", b"", 404, "no endpoint 'nothing' that you may call"),
        ("models/nothing/load", b"", 404, "falaj endpoints deploy"),
        ("models/forbidden/load", b"", 404, "no endpoint 'forbidden' that you may call"),
        ("models/forbidden/unload", b"", 404, "no endpoint 'forbidden' that you may call"),
        ("models/m/unload", b"", 409, "falaj endpoints remove m"),
        ("models/m/load", b'{"parameters":{"config":"{}"}}', 400, "falaj endpoints deploy"),
        ("models/m/load", b'{"parameters":{"file:1/model.onnx":"aa"}}', 400, "models come from the registry"),
        ("models/m/load", b"[", 400, "not a load request"),
        ("models/m/load", b'{"parameters":3}', 400, "not a load request"),
        ("index", b'{"ready":"yes"}', 400, "not a repository index request"),
        ("index", b"[" * 10_000, 400, "not a repository index request"),
    ],
)
def test_what_only_a_deployment_may_change_is_refused(
    server: RunningServer, path: str, body: bytes, status: int, words: str
) -> None:
    with RawClient(server.port) as client:
        found, _, answer = client.ask(request(path=f"/v2/repository/{path}", body=body))

    assert (found, words in json.loads(answer)["error"]) == (status, True), answer


def test_the_stock_client_says_why_a_model_is_not_unloaded(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="falaj endpoints remove m"):
        client.unload_model("m", headers=headers())

    infer(client, 1)


@pytest.mark.parametrize("path", ["/v2/models/m/config", "/v2/models/m/stats", "/v2/models/stats"])
def test_reports_are_read_only_and_need_a_token(server: RunningServer, path: str) -> None:
    with RawClient(server.port) as client:
        assert client.ask(request("POST", path))[0] == 405
        assert client.ask(request("GET", path.replace("/m/", "/forbidden/"), token=None))[0] == 401


@pytest.mark.parametrize("path", ["/v2/models/forbidden/config", "/v2/models/forbidden/stats"])
def test_reports_conceal_endpoints_of_others(server: RunningServer, path: str) -> None:
    with RawClient(server.port) as client:
        status, _, answer = client.ask(request("GET", path))
        assert client.ask(request(body=BODY))[0] == 200

    assert (status, b"no endpoint 'forbidden' that you may call" in answer) == (404, True)
