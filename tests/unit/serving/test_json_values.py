"""Values in JSON: short floats, bare words for what is not finite, and a reader of such words that nothing confuses."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.http as triton
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from falaj.apps.model_server.inference.json_values import encode_values, mark_words
from falaj.apps.model_server.inference.protocol import read_request, read_values
from falaj.errors import InvalidInput
from falaj.records.serving.tensors import Datatype
from model_servers import TOKEN, RawClient, RunningServer, deployment, model, request, serving


def headers() -> dict[str, str]:
    """Return headers anew: the client writes into them."""
    return {"Authorization": f"Bearer {TOKEN}"}


def echo(path: Path, kind: int) -> Path:
    onnx.save(
        model([helper.make_node("Identity", ["x"], ["y"])], {"x": ["n", 2]}, {"y": ["n", 2]}, kind=kind), path
    )
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    kinds = {"m": TensorProto.FLOAT, "double": TensorProto.DOUBLE, "half": TensorProto.FLOAT16}
    kinds |= {"whole": TensorProto.INT64, "text": TensorProto.STRING}
    with serving(
        deployment(*((name, "1", echo(folder / f"{name}.onnx", kind)) for name, kind in kinds.items()))
    ) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    with RawClient(server.port) as made:
        yield made


def body(data: str, datatype: str = "FP32", shape: str = "[1,2]", more: str = "") -> bytes:
    tensor = f'{{"name":"x","shape":{shape},"datatype":"{datatype}","data":{data}}}'
    return f'{{"inputs":[{tensor}]{more}}}'.encode()


def test_a_float_has_no_more_digits_than_it_needs(client: RawClient) -> None:
    _, _, single = client.ask(request(body=body("[0.1,16777216]")))
    _, _, double = client.ask(request(path="/v2/models/double/infer", body=body("[0.1,1e300]", "FP64")))

    assert b'"data":[0.1,16777216.0]' in single
    assert b'"data":[0.1,1e+300]' in double


@pytest.mark.parametrize(
    "data", ["[NaN,-Infinity]", "[[NaN,-Infinity]]", "[ NaN , -Inf ]", "[\n\tNaN,\r-Infinity]"]
)
@pytest.mark.parametrize(("name", "datatype"), [("m", "FP32"), ("double", "FP64"), ("half", "FP16")])
def test_words_are_read_and_written(client: RawClient, name: str, datatype: str, data: str) -> None:
    status, _, answer = client.ask(request(path=f"/v2/models/{name}/infer", body=body(data, datatype)))

    assert (status, b'"data":[NaN,-Infinity]' in answer) == (200, True), answer
    assert math.isnan(json.loads(answer)["outputs"][0]["data"][0])


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_the_stock_client_gets_what_is_not_finite(
    server: RunningServer, binary_in: bool, binary_out: bool
) -> None:
    values = np.array([[np.nan, np.inf], [-np.inf, 0.1]], np.float32)
    given_ = triton.InferInput("x", [2, 2], "FP32")
    given_.set_data_from_numpy(values, binary_data=binary_in)
    wanted = [triton.InferRequestedOutput("y", binary_data=binary_out)]

    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        answer = client.infer("m", [given_], outputs=wanted, headers=headers()).as_numpy("y")

    np.testing.assert_array_equal(answer, values)


BAD = {
    ("m", body('["NaN",1]')): "Expected `float`, got `str`",
    ("m", body('[NaN,"NaN"]')): "Expected `float`, got `str`",
    ("m", body('[[NaN,"a"]]')): "Expected `float`, got `str`",
    ("m", body("[nan,1]")): "not an inference request",
    ("m", body("[+NaN,1]")): "not an inference request",
    ("m", body("[NaN1,1]")): "not an inference request",
    ("m", body("[NaN,1]", shape="[NaN,2]")): "not an inference request",
    ("m", body("[1,2]", more=',"id":NaN')): "not an inference request",
    ("m", body("[1,2]", more=',"parameters":{"a":NaN}')): "not an inference request",
    ("m", body("[NaN,NaN,NaN]")): "3 values, where the shape needs 2",
    ("m", b'"' + b'\\"' * 100_000): "not an inference request",
    ("m", b"[NaN," + b'\\"' * 100_000 + b"\\"): "not an inference request",
    ("whole", body("[NaN,1]", "INT64")): "Expected `int`, got `str`",
    ("text", body('[NaN,"a"]', "BYTES")): "Expected `str`, got `float`",
}


@pytest.mark.parametrize(("name", "sent"), BAD)
def test_words_elsewhere_are_refused(client: RawClient, name: str, sent: bytes) -> None:
    began = time.process_time()

    status, _, answer = client.ask(request(path=f"/v2/models/{name}/infer", body=sent))

    assert status == 400
    assert BAD[name, sent] in json.loads(answer)["error"]
    assert time.process_time() - began < 2


def test_texts_that_look_like_words_stay_texts(client: RawClient) -> None:
    sent = body('["[NaN,1]", ",NaN,"]', "BYTES")

    _, _, answer = client.ask(request(path="/v2/models/text/infer", body=sent))

    assert json.loads(answer)["outputs"][0]["data"] == ["[NaN,1]", ",NaN,"]


@pytest.mark.parametrize("filler", [b'"', b"[", b",", b"[ ", b"\\", b'\\"', b"NaN", b"-", b",NaN", b'"\\'])
def test_no_bytes_take_more_than_linear_time(filler: bytes) -> None:
    began = time.process_time()

    mark_words(filler * (2**20 // len(filler)))

    assert time.process_time() - began < 2


floats = st.floats(width=32)


@given(st.lists(floats, max_size=20))
def test_every_float32_comes_back(values: list[float]) -> None:
    text = encode_values(np.array(values, np.float32))
    sent = body(text.decode(), shape=f"[{len(values)}]")

    (tensor,) = read_request(sent, None).inputs

    found = read_values(tensor, Datatype.FP32, len(values))
    np.testing.assert_array_equal(found, np.array(values, np.float32))
    assert [struct.pack("<f", v) for v in json.loads(text) if v == v] == [
        struct.pack("<f", v) for v in values if v == v
    ]


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.integers(-(2**40), 2**40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(json_values)
def test_words_are_marked_only_where_json_has_them_in_a_list(value: Any) -> None:
    text = json.dumps(value)

    marked = mark_words(text.encode())

    assert _words_in_lists(value) == (marked is not None)
    if marked is None:
        return
    assert _words_in_lists(json.loads(marked)) is False


def _words_in_lists(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_words_in_lists(v) for v in value.values())
    if isinstance(value, list):
        return any((isinstance(v, float) and not math.isfinite(v)) or _words_in_lists(v) for v in value)
    return False


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    with suppress(InvalidInput):
        read_request(data, None)
