"""The Open Inference Protocol over gRPC, with the stock clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from queue import Queue

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as aio
from tritonclient.utils import InferenceServerException

from model_servers import TOKEN, RunningServer, constant, deployment, mlp, serving, tabular
from polling import PATIENCE_S

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


def test_several_inputs_and_outputs_of_different_types(client: triton.InferenceServerClient) -> None:
    inputs = [
        tensor("category", np.array([0, 4]), "INT64"),
        tensor("amount", np.array([1.0, 4.0]), "FP64"),
    ]

    answer = client.infer("scores", inputs, headers=HEADERS)

    assert answer.as_numpy("score").tolist() == [2.0, 12.0]
    assert answer.as_numpy("high").tolist() == [False, True]


def test_outputs_may_be_chosen(client: triton.InferenceServerClient) -> None:
    inputs = [tensor("category", np.array([0]), "INT64"), tensor("amount", np.array([1.0]), "FP64")]

    answer = client.infer("scores", inputs, outputs=[triton.InferRequestedOutput("high")], headers=HEADERS)

    assert [each.name for each in answer.get_response().outputs] == ["high"]
    with pytest.raises(InferenceServerException, match="output 'low': given an unknown name"):
        client.infer("scores", inputs, outputs=[triton.InferRequestedOutput("low")], headers=HEADERS)


def test_a_version_is_chosen_by_name_and_by_request_id(client: triton.InferenceServerClient) -> None:
    inputs = [tensor("x", np.zeros((1, 2), np.float32), "FP32")]

    def version(**options: str) -> str:
        return str(client.infer("ab", inputs, headers=HEADERS, **options).get_response().model_version)

    chosen = {f"user-{n}": version(request_id=f"user-{n}") for n in range(20)}

    assert [version(model_version=name) for name in ("1", "2")] == ["1", "2"]
    assert set(chosen.values()) == {"1", "2"}
    assert all(version(request_id=request) == found for request, found in chosen.items())
    assert {version() for _ in range(4)} == {"1", "2"}


def test_calls_in_the_background_get_their_own_answers(client: triton.InferenceServerClient) -> None:
    results: Queue[tuple[int, object, object]] = Queue()
    for value in range(40):
        inputs = [
            tensor("amount", np.array([float(value)]), "FP64"),
            tensor("category", np.array([0]), "INT64"),
        ]
        done = partial(lambda value, result, error: results.put((value, result, error)), value)
        client.async_infer("scores", inputs, done, headers=HEADERS)

    found = [results.get(timeout=PATIENCE_S) for _ in range(40)]

    assert all(error is None for _, _, error in found)
    assert all(result.as_numpy("score")[0] == 2.0 * value for value, result, _ in found)


def test_a_stream_is_answered_in_order(client: triton.InferenceServerClient) -> None:
    results: Queue[tuple[object, object]] = Queue()
    client.start_stream(lambda result, error: results.put((result, error)), headers=HEADERS)
    wide = np.zeros((1, 31), np.float32)
    for number in range(100):
        inputs = [
            tensor("amount", np.array([float(number)]), "FP64"),
            tensor("category", np.array([0]), "INT64"),
        ]
        client.async_stream_infer("scores", inputs, request_id=str(number), enable_empty_final_response=True)
    client.async_stream_infer("m", [tensor("x", wide, "FP32")])
    client.async_stream_infer("forbidden", [tensor("x", wide, "FP32")])

    found = [results.get(timeout=PATIENCE_S) for _ in range(102)]
    client.stop_stream()

    assert [result.get_response().id for result, _ in found[:100]] == [str(n) for n in range(100)]
    assert [result.as_numpy("score")[0] for result, _ in found[:100]] == [2.0 * n for n in range(100)]
    assert found[0][0].get_response().parameters["triton_final_response"].bool_param
    assert "given shape [1, 31], allowed [-1, 32]" in str(found[100][1])
    assert "no endpoint 'forbidden' that you may call" in str(found[101][1])


def test_the_asynchronous_client(server: RunningServer) -> None:
    asyncio.run(_asynchronous_calls(server))


async def _asynchronous_calls(server: RunningServer) -> None:
    inputs = [tensor("x", np.zeros((1, 2), np.float32), "FP32")]
    async with aio.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        assert await client.is_model_ready("ab", headers=HEADERS)
        calls = [client.infer("ab", inputs, model_version="2", headers=HEADERS) for _ in range(20)]
        answers = await asyncio.gather(*calls)

        async def requests() -> AsyncIterator[dict[str, object]]:
            for number in range(3):
                yield {"model_name": "ab", "inputs": inputs, "model_version": "1", "request_id": str(number)}

        streamed = [result async for result, _ in client.stream_infer(requests(), headers=HEADERS)]

    assert [float(answer.as_numpy("y")[0, 0]) for answer in answers] == [2.0] * 20
    assert [float(answer.as_numpy("y")[0, 0]) for answer in streamed] == [1.0] * 3


def test_what_clients_of_triton_ask_about_models(client: triton.InferenceServerClient) -> None:
    inputs = [tensor("x", np.zeros((3, 32), np.float32), "FP32")]
    before = client.get_inference_statistics("m", headers=HEADERS).model_stats[0].inference_count
    client.infer("m", inputs, headers=HEADERS)

    config = client.get_model_config("m", headers=HEADERS).config
    statistics = client.get_inference_statistics("m", headers=HEADERS).model_stats
    everything = client.get_inference_statistics(headers=HEADERS).model_stats
    index = client.get_model_repository_index(headers=HEADERS).models

    assert (config.name, config.backend, list(config.input[0].dims)) == ("m", "onnxruntime", [32])
    assert config.input[0].data_type == 11
    assert [(each.name, each.version) for each in statistics] == [("m", "1")]
    assert statistics[0].inference_count == before + 3
    assert {each.name for each in everything} == {each.name for each in index}
    assert ("ab", "2", "READY") in [(each.name, each.version, each.state) for each in index]
    assert "forbidden" not in {each.name for each in index}


def test_models_are_loaded_by_deploying_them(client: triton.InferenceServerClient) -> None:
    client.load_model("m", headers=HEADERS)

    with pytest.raises(InferenceServerException, match="parameters: given"):
        client.load_model("m", config="{}", headers=HEADERS)
    with pytest.raises(InferenceServerException, match="falaj endpoints deploy"):
        client.load_model("nothing", headers=HEADERS)
    with pytest.raises(InferenceServerException, match="falaj endpoints remove m"):
        client.unload_model("m", headers=HEADERS)
    with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED.*there is no method"):
        client.get_trace_settings("m", headers=HEADERS)


@pytest.mark.parametrize(
    ("model", "name", "array", "datatype", "words"),
    [
        ("m", "z", np.zeros((1, 32), np.float32), "FP32", r"input 'z': given an unknown name.*x \(FP32"),
        ("m", "x", np.zeros((1, 32)), "FP64", "input 'x': given datatype FP64, allowed FP32"),
        ("m", "x", np.zeros((1, 31), np.float32), "FP32", r"given shape \[1, 31\], allowed \[-1, 32\]"),
        ("nothing", "x", np.zeros((1, 32), np.float32), "FP32", "NOT_FOUND.*no endpoint 'nothing' that you"),
        ("forbidden", "x", np.zeros((1, 2), np.float32), "FP32", "NOT_FOUND.*no endpoint 'forbidden' that"),
    ],
)
def test_invalid_requests_are_refused_with_the_reason(
    client: triton.InferenceServerClient, model: str, name: str, array: np.ndarray, datatype: str, words: str
) -> None:
    with pytest.raises(InferenceServerException, match=words):
        client.infer(model, [tensor(name, array, datatype)], headers=HEADERS)


def test_a_request_without_a_token_is_refused(client: triton.InferenceServerClient) -> None:
    for call in (client.get_server_metadata, client.get_model_repository_index):
        with pytest.raises(InferenceServerException, match=r"UNAUTHENTICATED.*no token was presented"):
            call()
    with pytest.raises(InferenceServerException, match=r"UNAUTHENTICATED.*unknown, expired or revoked"):
        client.get_model_metadata("m", headers={"authorization": "Bearer wrong"})


def test_compressed_messages(client: triton.InferenceServerClient, folder: Path) -> None:
    given = np.ones((2000, 32), np.float32)
    for algorithm in ("gzip", "deflate", "gzip"):
        answer = client.infer(
            "m", [tensor("x", given, "FP32")], headers=HEADERS, compression_algorithm=algorithm
        )

        assert answer.as_numpy("y").shape == (2000, 1)


def test_large_messages_pass_in_both_directions(client: triton.InferenceServerClient, folder: Path) -> None:
    given = np.random.default_rng(2).standard_normal((100_000, 32)).astype(np.float32)

    answer = client.infer("m", [tensor("x", given, "FP32")], headers=HEADERS)

    (expected,) = ort.InferenceSession(folder / "m.onnx").run(None, {"x": given})
    np.testing.assert_allclose(answer.as_numpy("y"), expected, rtol=1e-3, atol=1e-5)


def test_a_message_over_the_limit_is_refused(client: triton.InferenceServerClient) -> None:
    given = np.zeros((140_000, 32), np.float32)

    with pytest.raises(InferenceServerException, match=r"RESOURCE_EXHAUSTED.*exceeds the limit of 16777216"):
        client.infer("m", [tensor("x", given, "FP32")], headers=HEADERS)


def test_the_rules_of_an_endpoint_hold_by_grpc_too(client: triton.InferenceServerClient) -> None:
    inputs = [tensor("x", np.zeros((1, 2), np.float32), "FP32")]
    named = [
        client.infer("ab", inputs, headers=HEADERS | {"falaj-version": version}).get_response().model_version
        for version in ("1", "2", "2", "1")
    ]

    nothing = client.infer("ab", [tensor("x", np.zeros((0, 2), np.float32), "FP32")], headers=HEADERS)
    urgent = client.infer("ab", inputs, priority=1, timeout=int(PATIENCE_S * 1e6), headers=HEADERS)

    assert named == ["1", "2", "2", "1"]
    assert nothing.as_numpy("y").shape == (0, 1)
    assert urgent.as_numpy("y").shape == (1, 1)
    with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*given '9', allowed a routed version"):
        client.infer("ab", inputs, headers=HEADERS | {"falaj-version": "9"})
    with pytest.raises(InferenceServerException, match=r"DEADLINE_EXCEEDED.*it was not run"):
        client.infer("ab", inputs, timeout=1, headers=HEADERS)
    with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT.*parameter 'priority'"):
        client.infer("ab", inputs, priority=2**40, headers=HEADERS)


def test_the_highest_classes_may_be_asked_for(client: triton.InferenceServerClient) -> None:
    inputs = [tensor("x", np.ones((2, 32), np.float32), "FP32")]

    answer = client.infer(
        "m", inputs, outputs=[triton.InferRequestedOutput("y", class_count=1)], headers=HEADERS
    )

    assert answer.get_response().outputs[0].datatype == "BYTES"
    assert all(text.endswith(b":0") for text in answer.as_numpy("y").ravel())


def test_repeated_requests_follow_what_is_served(folder: Path) -> None:
    """A request that is recognised by its bytes is answered by the version that is served now."""
    first, second = constant(folder / "first.onnx", 1), constant(folder / "second.onnx", 2)
    inputs = [tensor("x", np.zeros((1, 2), np.float32), "FP32")]
    with (
        serving(deployment(("c", "1", first))) as running,
        triton.InferenceServerClient(f"127.0.0.1:{running.grpc_port}") as client,
    ):
        before = [float(client.infer("c", inputs, headers=HEADERS).as_numpy("y")[0, 0]) for _ in range(3)]
        running.apply(deployment(("c", "2", second)))
        after = [float(client.infer("c", inputs, headers=HEADERS).as_numpy("y")[0, 0]) for _ in range(3)]

    assert (before, after) == ([1.0] * 3, [2.0] * 3)
