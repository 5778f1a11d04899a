"""Answers of gRPC as bytes: what is packed for single rows is what would be written for any."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from falaj.apps.model_server.grpc.answers import InferWriter
from falaj.apps.model_server.grpc.http2 import AFTER_MESSAGE, BEFORE_MESSAGE, pack_answer
from falaj.apps.model_server.inference.protocol import OutputChoice
from falaj.records.serving.tensors import DYNAMIC, Datatype, ServedModel, Tensor
from falaj.serving.tensors import NUMPY

ALL = (OutputChoice(0, False),)


def writer(datatype: Datatype = Datatype.FP32, *, width: int = 3, outputs: int = 1) -> InferWriter:
    tensors = tuple(
        Tensor(name=f"y{number}", datatype=datatype, shape=(DYNAMIC, width)) for number in range(outputs)
    )
    given = (Tensor(name="x", datatype=Datatype.FP32, shape=(DYNAMIC, 2)),)
    model = ServedModel(name="m", version="7", platform="onnx", inputs=given, outputs=tensors)
    return InferWriter("endpoint", model)


@settings(max_examples=100, deadline=None)
@given(
    ident=st.text(max_size=300),
    stream=st.integers(1, 2**31 - 1),
    width=st.integers(1, 64),
    rows=st.integers(1, 5),
    datatype=st.sampled_from([each for each in Datatype if each is not Datatype.BYTES]),
)
def test_a_packed_row_is_the_answer_that_would_be_written(
    ident: str, stream: int, width: int, rows: int, datatype: Datatype
) -> None:
    made = writer(datatype, width=width)
    array = np.arange(rows * width).reshape(rows, width).astype(NUMPY[datatype])
    assert made.rows is not None
    found = made.rows.rows([array])
    assert found is not None

    packed = [made.rows.pack(stream, ident, row) for row in found]

    for number, each in enumerate(packed):
        message = made.write("", ident, [array[number : number + 1]], ALL)
        assert each == pack_answer(stream, struct.pack(">BL", 0, len(message)) + message)
        answer = service_pb2.ModelInferResponse.FromString(each[BEFORE_MESSAGE + 5 : -AFTER_MESSAGE])
        assert (answer.id, answer.model_version, list(answer.outputs[0].shape)) == (ident, "7", [1, width])


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 3, 1)])
def test_outputs_of_other_shapes_than_declared_are_not_packed(shape: tuple[int, ...]) -> None:
    made = writer().rows

    assert made is not None
    assert made.rows([np.zeros(shape, np.float32)]) is None


def test_only_models_with_one_output_of_a_few_numbers_are_packed() -> None:
    assert writer(outputs=2).rows is None
    assert writer(Datatype.BYTES).rows is None
    assert writer(width=65).rows is None
    assert writer(width=DYNAMIC).rows is None
