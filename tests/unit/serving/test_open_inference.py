"""The stock client of the Open Inference Protocol works unchanged, with JSON and with binary tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from model_servers import TOKEN, RunningServer, constant, deployment, mlp, serving, tabular


def headers() -> dict[str, str]:
    """Return new headers each time, because the client modifies them."""
    return {"Authorization": f"Bearer {TOKEN}"}


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
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=4) as made:
        yield made


def tensor(name: str, array: np.ndarray, datatype: str, *, binary: bool) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m", headers=headers())
    assert client.is_model_ready("ab", "2", headers=headers())
    assert client.get_server_metadata(headers=headers())["extensions"][0] == "binary_tensor_data"
    about = client.get_model_metadata("ab", headers=headers())
    assert about["versions"] == ["1", "2"]
    assert about["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_answers_equal_the_models_outputs(
    client: triton.InferenceServerClient, folder: Path, binary_in: bool, binary_out: bool
) -> None:
    rows = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
    wanted = [triton.InferRequestedOutput("y", binary_data=binary_out)]

    inputs = [tensor("x", rows, "FP32", binary=binary_in)]
    answer = client.infer("m", inputs, outputs=wanted, headers=headers(), request_id="r1")

    (expected,) = ort.InferenceSession(folder / "m.onnx").run(None, {"x": rows})
    np.testing.assert_allclose(answer.as_numpy("y"), expected, rtol=1e-4, atol=1e-6)
    assert answer.get_response()["id"] == "r1"


@pytest.mark.parametrize("binary", [True, False])
def test_several_inputs_and_outputs_of_different_types(
    client: triton.InferenceServerClient, binary: bool
) -> None:
    inputs = [
        tensor("category", np.array([0, 4]), "INT64", binary=binary),
        tensor("amount", np.array([1.0, 4.0]), "FP64", binary=not binary),
    ]

    answer = client.infer("scores", inputs, headers=headers())

    assert answer.as_numpy("score").tolist() == [2.0, 12.0]
    assert answer.as_numpy("high").tolist() == [False, True]


def test_a_model_with_a_fixed_first_dimension(client: triton.InferenceServerClient) -> None:
    rows = np.ones((4, 32), np.float32)

    assert client.infer("fixed", [tensor("x", rows, "FP32", binary=True)], headers=headers()).as_numpy(
        "y"
    ).shape == (4, 1)
    with pytest.raises(InferenceServerException, match=r"given shape \[1, 32\], allowed \[4, 32\]"):
        client.infer("fixed", [tensor("x", rows[:1], "FP32", binary=True)], headers=headers())


def test_a_version_is_chosen_by_path(client: triton.InferenceServerClient) -> None:
    inputs = [tensor("x", np.zeros((1, 2), np.float32), "FP32", binary=True)]

    answers = [client.infer("ab", inputs, model_version=version, headers=headers()) for version in ("1", "2")]

    assert [float(answer.as_numpy("y")[0, 0]) for answer in answers] == [1.0, 2.0]


def test_a_request_id_always_reaches_the_same_version(client: triton.InferenceServerClient) -> None:
    inputs = [tensor("x", np.zeros((1, 2), np.float32), "FP32", binary=True)]

    def version(request: str) -> str:
        answer = client.infer("ab", inputs, request_id=request, headers=headers()).get_response()
        return str(answer["model_version"])

    chosen = {f"user-{n}": version(f"user-{n}") for n in range(20)}

    assert set(chosen.values()) == {"1", "2"}
    assert all(version(request) == found for request, found in chosen.items())


def test_concurrent_requests_get_their_own_answers(client: triton.InferenceServerClient) -> None:
    def ask(value: int) -> triton.InferAsyncRequest:
        inputs = [
            tensor("amount", np.array([float(value)]), "FP64", binary=True),
            tensor("category", np.array([0]), "INT64", binary=True),
        ]
        return client.async_infer("scores", inputs, headers=headers())

    pending = [ask(value) for value in range(40)]

    assert [p.get_result().as_numpy("score")[0] for p in pending] == [2.0 * v for v in range(40)]


@pytest.mark.parametrize(
    ("model", "name", "array", "datatype", "words"),
    [
        ("m", "z", np.zeros((1, 32), np.float32), "FP32", r"input 'z': given an unknown name.*x \(FP32"),
        ("m", "x", np.zeros((1, 32)), "FP64", "input 'x': given datatype FP64, allowed FP32"),
        ("m", "x", np.zeros((1, 31), np.float32), "FP32", r"given shape \[1, 31\], allowed \[-1, 32\]"),
        ("m", "x", np.zeros(32, np.float32), "FP32", r"given shape \[32\], allowed \[-1, 32\]"),
        ("nothing", "x", np.zeros((1, 32), np.float32), "FP32", "no endpoint 'nothing' that you may call"),
        ("forbidden", "x", np.zeros((1, 2), np.float32), "FP32", "no endpoint 'forbidden' that you may call"),
    ],
)
def test_invalid_requests_are_refused_with_the_reason(
    client: triton.InferenceServerClient, model: str, name: str, array: np.ndarray, datatype: str, words: str
) -> None:
    with pytest.raises(InferenceServerException, match=words):
        client.infer(model, [tensor(name, array, datatype, binary=True)], headers=headers())


def test_a_request_without_a_token_is_refused(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="no token was presented"):
        client.get_model_metadata("m")
    with pytest.raises(InferenceServerException, match="unknown, expired or revoked"):
        client.get_model_metadata("m", headers={"Authorization": "Bearer wrong"})
