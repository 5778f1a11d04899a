"""Tensors beyond plain numbers: bfloat16, raw bytes, classification, requests without rows, deadlines, priorities."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.http as triton
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException, deserialize_bf16_tensor, serialize_bf16_tensor

from falaj.apps.model_server.inference.classification import classify
from falaj.records.serving.tensors import DYNAMIC, Datatype, Tensor
from falaj.serving.tensors import bfloat16_bits, from_bfloat16_bits, from_bytes, to_bytes
from model_servers import (
    TOKEN,
    RawClient,
    RunningServer,
    constant,
    deployment,
    mlp,
    model,
    outer_sum,
    request,
    serving,
    tabular,
)
from polling import PATIENCE_S

KEYS = [b"a\x00b", b"\xff\x01\x02", b"abc", b"\xff"]


def headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKEN}"}


def labels(path: Path) -> Path:
    """Write a model that numbers texts, which need not be UTF-8."""
    node = helper.make_node(
        "LabelEncoder",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        keys_strings=KEYS,
        values_int64s=[1, 2, 3, 4],
        default_int64=-1,
    )
    graph = helper.make_graph(
        [node],
        "labels",
        [helper.make_tensor_value_info("x", TensorProto.STRING, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ["n"])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def saved(path: Path, made: onnx.ModelProto) -> Path:
    onnx.save(made, path)
    return path


def echo(kind: int) -> onnx.ModelProto:
    return model([helper.make_node("Identity", ["x"], ["y"])], {"x": ["n", 3]}, {"y": ["n", 3]}, kind=kind)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    files = {
        "m": constant(folder / "m.onnx", 1),
        "t": tabular(folder / "t.onnx"),
        "bf16": saved(folder / "bf16.onnx", echo(TensorProto.BFLOAT16)),
        "scores": saved(folder / "scores.onnx", echo(TensorProto.FLOAT)),
        "counts": saved(folder / "counts.onnx", echo(TensorProto.UINT8)),
        "texts": saved(folder / "texts.onnx", echo(TensorProto.STRING)),
        "labels": labels(folder / "labels.onnx"),
        "sum": saved(folder / "sum.onnx", outer_sum()),
        "fixed": mlp(folder / "fixed.onnx", rows=4),
    }
    with serving(deployment(*((name, "1", path) for name, path in files.items()))) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as made:
        yield made


@pytest.fixture
def raw(server: RunningServer) -> Iterator[RawClient]:
    with RawClient(server.port) as made:
        yield made


def tensor(array: np.ndarray, datatype: str, *, name: str = "x", binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


# ------------------------------------------------------------------------------------------- bfloat16


def test_bfloat16_goes_both_ways_as_bits(client: triton.InferenceServerClient) -> None:
    values = np.array([[1.5, -2.0, 3e38], [0.0, 1e-3, 7.0]], np.float32)

    answer = client.infer("bf16", [tensor(values, "BF16")], headers=headers())

    expected = deserialize_bf16_tensor(serialize_bf16_tensor(values).item()).reshape(2, 3)
    np.testing.assert_array_equal(answer.as_numpy("y"), expected)
    assert answer.get_output("y")["datatype"] == "BF16"
    assert answer.get_output("y")["parameters"]["binary_data_size"] == 12


def test_bfloat16_as_json_is_the_number_that_it_holds(raw: RawClient) -> None:
    body = b'{"inputs":[{"name":"x","shape":[1,3],"datatype":"BF16","data":[1.5,0.1,NaN]}]}'

    status, _, answer = raw.ask(request(path="/v2/models/bf16/infer", body=body))

    assert (status, b'"data":[1.5,0.100097656,NaN]' in answer) == (200, True), answer


def test_requests_of_bfloat16_share_a_run(client: triton.InferenceServerClient) -> None:
    sent = [np.full((1, 3), n, np.float32) for n in range(20)]
    pending = [client.async_infer("bf16", [tensor(each, "BF16")], headers=headers()) for each in sent]

    assert [float(p.get_result().as_numpy("y")[0, 0]) for p in pending] == list(range(20))


@given(st.floats(width=32))
def test_bfloat16_is_the_nearest(value: float) -> None:
    (found,) = from_bfloat16_bits(bfloat16_bits(np.array([value], np.float32)))

    if np.isnan(value):
        assert np.isnan(found)
        return
    (bits,) = bfloat16_bits(np.array([value], np.float32))
    with np.errstate(all="ignore"):
        for step in (-1, 1):
            near = from_bfloat16_bits(np.array([max(0, min(int(bits) + step, 0xFFFF))], np.uint16))[0]
            if np.isfinite(near) and np.isfinite(found):
                assert abs(float(found) - value) <= abs(float(near) - value)


@given(arrays.arrays(np.uint16, st.integers(0, 20)))
def test_any_bits_of_bfloat16_come_back(bits: np.ndarray) -> None:
    array = from_bytes(memoryview(bits.tobytes()), Datatype.BF16, len(bits))
    back = np.frombuffer(to_bytes(array, Datatype.BF16), np.uint16)

    same = np.isnan(array) | (back == bits)
    assert same.all()


# ------------------------------------------------------------------------------------------ raw bytes


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ([b"\xff\x01\x02"], [2]),
        ([b"a\x00b", b"\xff\x01\x02", b"abc"], [1, 2, 3]),
        ([b"\xff", b"\xfe"], [4, -1]),
        ([b"abc", b"a"], [3, -1]),
    ],
)
def test_bytes_that_are_not_text_reach_the_model(
    client: triton.InferenceServerClient, values: list[bytes], numbers: list[int]
) -> None:
    answer = client.infer("labels", [tensor(np.array(values, object), "BYTES")], headers=headers())

    assert answer.as_numpy("y").tolist() == numbers


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("labels", [b"\xff", b"abc"], "must have the same length"),
        ("texts", [b"\xff", b"a", b"b"], "an output of the model holds bytes that are not UTF-8"),
    ],
)
def test_bytes_that_the_engine_cannot_hold_are_refused(
    client: triton.InferenceServerClient, name: str, values: list[bytes], words: str
) -> None:
    shape = (1, 3) if name == "texts" else (len(values),)
    sent = tensor(np.array(values, object).reshape(shape), "BYTES")

    with pytest.raises(InferenceServerException, match=words):
        client.infer(name, [sent], headers=headers())


@given(st.binary(max_size=60), st.integers(0, 5))
def test_any_bytes_are_texts_or_refused(data: bytes, count: int) -> None:
    try:
        found = from_bytes(memoryview(data), Datatype.BYTES, count)
    except ValueError:
        return
    assert to_bytes(found, Datatype.BYTES) == data


# ------------------------------------------------------------------------------------- classification


@pytest.mark.parametrize("binary", [True, False])
def test_the_stock_client_gets_the_highest_classes(
    client: triton.InferenceServerClient, binary: bool
) -> None:
    values = np.array([[0.1, 0.7, 0.2], [3.0, 3.0, -1.0]], np.float32)
    wanted = [triton.InferRequestedOutput("y", binary_data=binary, class_count=2)]

    answer = client.infer("scores", [tensor(values, "FP32")], outputs=wanted, headers=headers())

    found = [[_text(value) for value in row] for row in answer.as_numpy("y").tolist()]
    assert found == [["0.7:1", "0.2:2"], ["3.0:0", "3.0:1"]]
    assert answer.get_output("y")["datatype"] == "BYTES"
    assert answer.get_output("y")["shape"] == [2, 2]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def classified(raw: RawClient, name: str, data: list[Any], datatype: str, classes: Any) -> tuple[int, Any]:
    body = {
        "inputs": [{"name": "x", "shape": [1, 3], "datatype": datatype, "data": data}],
        "outputs": [{"name": "y", "parameters": {"classification": classes}}],
    }
    status, _, answer = raw.ask(request(path=f"/v2/models/{name}/infer", body=json.dumps(body).encode()))
    found = json.loads(answer)
    return status, found["outputs"][0] if status == 200 else found["error"]


def test_classes_are_ordered_by_the_type_of_the_output(raw: RawClient) -> None:
    assert classified(raw, "counts", [1, 255, 7], "UINT8", 9)[1]["data"] == ["255:1", "7:2", "1:0"]
    assert classified(raw, "scores", [float("nan"), 1, 2], "FP32", 3)[1]["data"] == [
        *("2.0:2", "1.0:1", "NaN:0"),
    ]


@pytest.mark.parametrize("classes", [0, -1, True, 1.5, "2", None, 2**40])
def test_a_wrong_number_of_classes_is_refused(raw: RawClient, classes: Any) -> None:
    status, words = classified(raw, "scores", [1, 2, 3], "FP32", classes)

    assert (status, "allowed a number of classes from 1" in words) == (400, True)


def test_texts_have_no_classes(raw: RawClient) -> None:
    status, words = classified(raw, "texts", ["a", "b", "c"], "BYTES", 1)

    assert (status, "of an output of numbers" in words) == (400, True)


@given(
    arrays.arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(0, 6)), elements=st.floats(width=32)),
    st.integers(1, 8),
)
def test_classes_of_any_output(array: np.ndarray, classes: int) -> None:
    shape = Tensor(name="y", datatype=Datatype.FP32, shape=(DYNAMIC, DYNAMIC))

    found = classify(array, shape, classes)

    assert found.shape == (array.shape[0], min(classes, array.shape[1]))
    for row, texts in zip(array, found, strict=True):
        places = [int(text.rpartition(":")[2]) for text in texts]
        assert len(set(places)) == len(places)
        values = [-np.inf if np.isnan(row[place]) else row[place] for place in places]
        assert values == sorted(values, reverse=True)
        assert all(_same(text.rpartition(":")[0], row[p]) for text, p in zip(texts, places, strict=True))


def _same(text: str, value: float) -> bool:
    given_ = np.float32(text)
    return bool(given_ == value) or bool(np.isnan(given_) and np.isnan(value))


# ------------------------------------------------------------------------------------ without any rows


@pytest.mark.parametrize("binary", [True, False])
def test_a_request_without_rows_gets_an_answer_without_rows(
    client: triton.InferenceServerClient, binary: bool
) -> None:
    sent = [
        tensor(np.zeros(0), "FP64", name="amount", binary=binary),
        tensor(np.zeros(0, np.int64), "INT64", name="category", binary=binary),
    ]
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("score", "high")]

    answer = client.infer("t", sent, outputs=wanted, headers=headers())

    assert (answer.as_numpy("score").shape, answer.as_numpy("high").shape) == ((0,), (0,))


@pytest.mark.parametrize(
    ("name", "body", "status", "words"),
    [
        ("m", b'{"inputs":[{"name":"x","shape":[0,2],"datatype":"FP32","data":[]}]}', 200, '"shape":[0,1]'),
        ("m", b'{"inputs":[{"name":"x","shape":[0,2],"datatype":"FP32","data":[1]}]}', 400, "1 values"),
        ("m", b'{"inputs":[{"name":"x","shape":[0,2],"datatype":"FP32"}]}', 400, "data: none"),
        ("m", b'{"inputs":[{"name":"x","shape":[0,0],"datatype":"FP32","data":[]}]}', 400, "shape [0, 0]"),
        ("fixed", b'{"inputs":[{"name":"x","shape":[0,32],"datatype":"FP32","data":[]}]}', 400, "[4, 32]"),
        ("sum", b'{"inputs":[{"name":"x","shape":[0,1],"datatype":"FP32","data":[]}]}', 400, "need some: y"),
        (
            "t",
            b'{"inputs":[{"name":"amount","shape":[0],"datatype":"FP64","data":[]},'
            b'{"name":"category","shape":[1],"datatype":"INT64","data":[1]}]}',
            400,
            "rows",
        ),
    ],
)
def test_no_rows_where_rows_are_needed(
    raw: RawClient, name: str, body: bytes, status: int, words: str
) -> None:
    for _ in range(3):  # the connection may remember what it saw
        found, _, answer = raw.ask(request(path=f"/v2/models/{name}/infer", body=body))

        assert (found, words in answer.decode()) == (status, True), answer


# ---------------------------------------------------------------------------- deadlines and priorities


def scheduled(**parameters: Any) -> bytes:
    tensors = [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]
    return json.dumps({"inputs": tensors, "parameters": parameters}).encode()


def test_a_request_whose_time_is_over_is_not_run(raw: RawClient) -> None:
    status, _, answer = raw.ask(request(body=scheduled(timeout=1)))

    assert (status, "it was not run" in json.loads(answer)["error"]) == (504, True), answer
    assert raw.ask(request(body=scheduled(timeout=int(PATIENCE_S * 1e6))))[0] == 200


def test_the_stock_client_sets_deadline_and_priority(client: triton.InferenceServerClient) -> None:
    sent = [tensor(np.zeros((1, 2), np.float32), "FP32")]

    client.infer("m", sent, headers=headers(), priority=3, timeout=int(PATIENCE_S * 1e6))
    with pytest.raises(InferenceServerException, match="deadline"):
        client.infer("m", sent, headers=headers(), timeout=1)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"timeout": -1}, "parameter 'timeout': given -1, allowed microseconds"),
        ({"timeout": True}, "parameter 'timeout': given True"),
        ({"timeout": 1.5}, "parameter 'timeout': given 1.5"),
        ({"timeout": "1"}, "parameter 'timeout'"),
        ({"timeout": 2**62}, "parameter 'timeout'"),
        ({"timeout": None}, "parameter 'timeout'"),
        ({"priority": -1}, "parameter 'priority': given -1, allowed a whole number: 1 is the highest"),
        ({"priority": 2**40, "timeout": "x"}, "parameter 'timeout'"),
    ],
)
def test_a_wrong_schedule_is_refused(raw: RawClient, parameters: Any, words: str) -> None:
    status, _, answer = raw.ask(request(body=scheduled(**parameters)))

    assert (status, words in json.loads(answer)["error"]) == (400, True), answer


def test_the_size_of_a_text_cannot_lie(raw: RawClient) -> None:
    lying = struct.pack("<I", 2**31) + b"abc"
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "shape": [1],
                    "datatype": "BYTES",
                    "parameters": {"binary_data_size": len(lying)},
                }
            ]
        }
    ).encode()

    status, _, answer = raw.ask(
        request(
            path="/v2/models/labels/infer",
            body=head + lying,
            Inference_Header_Content_Length=str(len(head)),
        )
    )

    assert (status, b"truncated text" in answer) == (400, True)
