"""The Open Inference Protocol over gRPC, with the stock clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton

from model_servers import TOKEN, RunningServer, constant, deployment, mlp, serving, tabular

HEADERS = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    wanted = deployment(
        ("m", "1", mlp(folder / "m.onnx")),
        ("scores", "1", tabular(folder / "t.onnx")),
        ("fixed", "1", mlp(folder / "fixed.onnx", rows=4)),
        ("ab", "1", constant(folder / "one.onnx", 1)),
        ("ab", "2", constant(folder / "two.onnx", 2)),
        ("forbidden", "1", constant(folder / "three.onnx", 3)),
    )
    with serving(wanted) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as made:
        yield made


def tensor(name: str, array: np.ndarray, datatype: str) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m", headers=HEADERS)
    assert client.is_model_ready("ab", "2", headers=HEADERS)
    assert "statistics" in client.get_server_metadata(headers=HEADERS).extensions
    about = client.get_model_metadata("ab", headers=HEADERS)
    assert about.versions == ["1", "2"]
    assert [(each.name, each.datatype, list(each.shape)) for each in about.inputs] == [("x", "FP32", [-1, 2])]


def test_answers_equal_the_models_outputs(client: triton.InferenceServerClient, folder: Path) -> None:
    session = ort.InferenceSession(folder / "m.onnx")
    random = np.random.default_rng(1)
    for rows in (3, 1, 1, 1, 2, 1):
        given = random.standard_normal((rows, 32)).astype(np.float32)

        answer = client.infer("m", [tensor("x", given, "FP32")], headers=HEADERS, request_id="r1")

        (expected,) = session.run(None, {"x": given})
        np.testing.assert_allclose(answer.as_numpy("y"), expected, rtol=1e-4, atol=1e-6)
        assert answer.get_response().id == "r1"
