"""A malicious ONNX model cannot harm the process that opens it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from falaj.errors import InvalidInput, Unavailable
from falaj.records.serving import ServedFile
from falaj.serving.runtime import engine as engines
from falaj.serving.runtime.engine import open_model

SECRET = b"a secret of ours"


def reading(tensor: TensorProto, *, as_constant: bool) -> ModelProto:
    """A model that adds the bytes of `tensor` to its input."""
    tensor.name = "w"
    nodes = [helper.make_node("Constant", [], ["w"], value=tensor)] if as_constant else []
    nodes += [
        helper.make_node("Cast", ["w"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    shape = ["n", len(SECRET)]
    graph = helper.make_graph(
        nodes,
        "reads",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [] if as_constant else [tensor],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def in_file(location: str) -> TensorProto:
    tensor = TensorProto(data_type=TensorProto.UINT8, dims=[len(SECRET)], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": "0", "length": str(len(SECRET))}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.mark.parametrize("as_constant", [False, True], ids=["initializer", "constant"])
@pytest.mark.parametrize("above", ["", "../", "/"])
def test_a_model_cannot_read_files_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, above: str, as_constant: bool
) -> None:
    (tmp_path / "secret.key").write_bytes(SECRET)
    monkeypatch.chdir(tmp_path)
    location = (
        f"{tmp_path}/secret.key" if above == "/" else f"{above}{above and tmp_path.name + '/'}secret.key"
    )
    content = reading(in_file(location), as_constant=as_constant).SerializeToString()

    with pytest.raises(InvalidInput, match="not an ONNX model that can be opened"):
        open_model(ServedFile(model="m", version="1"), content)


def test_weights_inside_the_model_are_read(tmp_path: Path) -> None:
    inside = TensorProto(data_type=TensorProto.UINT8, dims=[len(SECRET)], raw_data=SECRET)

    engine = open_model(
        ServedFile(model="m", version="1"), reading(inside, as_constant=False).SerializeToString()
    )

    (answer,) = engine.run([np.zeros((1, len(SECRET)), np.float32)])
    assert bytes(answer[0].astype(np.uint8)) == SECRET


def counting() -> ModelProto:
    """A model that counts as far as its input says, one by one."""
    step = helper.make_graph(
        [
            helper.make_node("Add", ["sum", "one"], ["next"]),
            helper.make_node("Identity", ["go"], ["on"]),
        ],
        "step",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", TensorProto.INT64, [1]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.INT64, [1]),
        ],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["x", "", "zero"], ["y"], body=step)],
        "counts",
        [helper.make_tensor_value_info("x", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [1])],
        [
            helper.make_tensor(name, TensorProto.INT64, [1], [value])
            for name, value in (("one", 1), ("zero", 0))
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_a_model_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is quick on made-up values, and so would run where all requests wait for it."""
    monkeypatch.setattr(engines, "QUICK_S", 0.2)
    monkeypatch.setattr(engines, "LONGEST_S", 0.2)
    engine = open_model(ServedFile(model="m", version="1"), counting().SerializeToString())

    with pytest.raises(Unavailable, match=r"exceeded its time limit of 0\.2 s"):
        engine.run([np.array([2**62])])

    assert engine.run([np.array([3])])[0].tolist() == [3]
