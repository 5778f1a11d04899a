"""Inputs and outputs are read from the model file itself: ONNX graphs, XGBoost and LightGBM models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import xgboost
from onnx import TensorProto, helper

from falaj.errors import InvalidInput
from falaj.ports.parsers import ByteSource
from falaj.registry.file_formats.model_tensors import parse_model_tensors


def parsed(content: bytes, kind: str = "onnx") -> dict[str, Any]:
    source = ByteSource(len(content), lambda offset, length: content[offset : offset + length])
    return dict(parse_model_tensors([source], {"path": "model", "format": kind}).facts)


def graph(inputs: list[Any], outputs: list[Any], weights: dict[str, Any] | None = None) -> bytes:
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    made = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, initializers))
    return bytes(made.SerializeToString())


def test_tensors_are_as_the_onnx_library_reads_them() -> None:
    kinds = {
        TensorProto.FLOAT: "float32",
        TensorProto.STRING: "string",
        TensorProto.BOOL: "bool",
        TensorProto.INT64: "int64",
        TensorProto.BFLOAT16: "bfloat16",
        TensorProto.UINT16: "uint16",
    }
    inputs = [helper.make_tensor_value_info(f"in {k}", k, ["rows", 3, None]) for k in kinds]
    outputs = [helper.make_tensor_value_info("y", TensorProto.DOUBLE, [])]

    found = parsed(graph(inputs, outputs))

    assert found["inputs"] == [
        {"name": f"in {kind}", "dtype": name, "shape": [-1, 3, -1]} for kind, name in kinds.items()
    ]
    assert found["outputs"] == [{"name": "y", "dtype": "float64", "shape": []}]


def test_weights_that_are_listed_as_inputs_are_none() -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "w")]

    found = parsed(graph(values, values[:1], {"w": np.zeros(2, np.float32)}))

    assert [each["name"] for each in found["inputs"]] == ["x"]


def test_large_weights_are_skipped_not_read() -> None:
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])]
    content = graph(values, values, {"w": np.zeros(4 << 20, np.float32)})
    read: list[int] = []

    def read_range(offset: int, length: int) -> bytes:
        read.append(length)
        return content[offset : offset + length]

    parse_model_tensors([ByteSource(len(content), read_range)], {"path": "model", "format": "onnx"})

    assert len(content) > 16 << 20
    assert sum(read) < 1 << 20


def test_a_shape_that_is_not_there_is_none_and_strange_sizes_are_any() -> None:
    unshaped = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    strange = helper.make_tensor_value_info("y", TensorProto.FLOAT, [-5, 0, 2**62, 7])

    found = parsed(graph([unshaped], [strange]))

    assert found["inputs"][0]["shape"] is None
    assert found["outputs"][0]["shape"] == [-1, -1, -1, 7]


def test_a_sequence_is_refused_with_the_fix() -> None:
    value = helper.make_tensor_sequence_value_info("labels", TensorProto.FLOAT, [2])

    with pytest.raises(InvalidInput) as refused:
        parsed(graph([helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])], [value]))

    (fault,) = refused.value.faults
    assert "labels" in fault.where
    assert "zipmap=False" in str(fault.fix)


def test_a_file_that_ends_early_is_refused_wherever_it_ends() -> None:
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])]
    content = graph(values, values)

    for size in range(1, len(content)):
        try:
            parsed(content[:size])
        except InvalidInput:
            continue


@pytest.mark.parametrize("layout", ["json", "ubj"])
@pytest.mark.parametrize(
    ("objective", "classes"), [("binary:logistic", 1), ("multi:softprob", 3), ("reg:squarederror", 1)]
)
def test_xgboost_says_features_classes_and_objective(layout: str, objective: str, classes: int) -> None:
    rows = np.random.default_rng(0).random((60, 5))
    target = (rows[:, 0] * classes).astype(int) if classes > 1 else rows[:, 0] > 0.5
    more = {"num_class": classes} if classes > 1 else {}
    booster = xgboost.train({"objective": objective, **more}, xgboost.DMatrix(rows, target), 3)

    found = parsed(bytes(booster.save_raw(layout)), "xgboost")

    assert found == {
        "layout": layout,
        "features": 5,
        "classes": classes,
        "objective": objective,
        "booster": "gbtree",
    }


def test_lightgbm_says_features_classes_and_objective(tmp_path: Path) -> None:
    text = b"tree\nversion=v4\nnum_class=3\nnum_tree_per_iteration=3\nlabel_index=0\nmax_feature_idx=6\n"

    found = parsed(text + b"objective=multiclass num_class:3\nfeature_names=a b c d e f g\n", "lightgbm")

    assert (found["features"], found["classes"], found["objective"]) == (7, 3, "multiclass")
