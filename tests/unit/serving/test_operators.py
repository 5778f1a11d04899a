"""Which models are known to take as long on any values: those whose every operator is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from falaj.serving.runtime.engines.operators import reason_unbounded
from model_servers import centred, constant, counting, filling, mlp, model, outer_sum, tabular, widened

node = helper.make_node


@pytest.mark.parametrize("make", [mlp, centred, tabular, lambda p: constant(p, 1), lambda p: widened(p, 9)])
def test_plain_models_are_bounded(tmp_path: Path, make: Any) -> None:
    assert reason_unbounded(make(tmp_path / "m.onnx").read_bytes()) is None


def test_models_of_other_tools_are_bounded(tmp_path: Path) -> None:
    """What the platform itself exports and optimizes stays on the fast path."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from skl2onnx import to_onnx
    from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows = np.random.default_rng(0).random((40, 4), np.float32)
    labels = rows[:, 0] > 0.5
    models = [
        RandomForestClassifier(3),
        GradientBoostingRegressor(n_estimators=3),
        make_pipeline(StandardScaler(), LogisticRegression()),
    ]
    for each in models:
        options = {"zipmap": False} if hasattr(each, "predict_proba") else None
        exported = to_onnx(each.fit(rows, labels), rows[:1], options=options)

        assert reason_unbounded(exported.SerializeToString()) is None

    dense = model(
        [node("MatMul", ["x", "w"], ["y"])],
        {"x": ["n", 4]},
        {"y": ["n", 2]},
        kind=TensorProto.FLOAT,
        weights={"w": np.ones((4, 2), np.float32)},
    )
    quantize_dynamic(dense, tmp_path / "quantized.onnx", weight_type=QuantType.QInt8)
    assert reason_unbounded((tmp_path / "quantized.onnx").read_bytes()) is None


BY_VALUE = [
    node("ConstantOfShape", ["x"], ["y"]),
    node("Range", ["x", "x", "x"], ["y"]),
    node("Expand", ["x", "x"], ["y"]),
    node("Tile", ["x", "x"], ["y"]),
    node("Pad", ["x", "x"], ["y"]),
    node("OneHot", ["x", "x", "x"], ["y"]),
    node("Resize", ["x", "", "", "x"], ["y"]),
    node("HannWindow", ["x"], ["y"]),
    node("SequenceEmpty", [], ["y"]),
    node("NonMaxSuppression", ["x", "x", "x"], ["y"]),
    node("Relu", ["x"], ["y"], domain="my.functions"),
    node("BeamSearch", ["x"], ["y"], domain="com.microsoft"),
    node("AnOperatorOfTomorrow", ["x"], ["y"]),
]


@pytest.mark.parametrize("operator", BY_VALUE, ids=lambda each: each.op_type)
def test_operators_that_follow_values_are_not(operator: Any) -> None:
    content = model([operator], {"x": [1]}, {"y": ["n"]}).SerializeToString()

    assert reason_unbounded(content) is not None


def test_amounts_that_are_constants_are_bounded() -> None:
    nodes = [
        node("Identity", ["two"], ["times"]),
        node("Tile", ["x", "times"], ["y"]),
    ]

    assert (
        reason_unbounded(
            model(nodes, {"x": [1]}, {"y": [2]}, weights={"two": np.array([2])}).SerializeToString()
        )
        is None
    )


WHOLE, FLOAT = TensorProto.INT64, TensorProto.FLOAT
HALF = np.array([0.5], np.float32)
DIVISIONS = [
    ([node("Div", ["x", "x"], ["y"])], FLOAT, True),
    ([node("Div", ["x", "half"], ["y"])], FLOAT, True),
    ([node("Mod", ["x", "half"], ["y"], fmod=1)], FLOAT, True),
    ([node("Cast", ["x"], ["c"], to=FLOAT), node("Div", ["c", "c"], ["y"])], WHOLE, True),
    ([node("Split", ["x"], ["a", "b"]), node("Div", ["b", "b"], ["y"])], FLOAT, True),
    ([node("Scaler", ["x"], ["s"], domain="ai.onnx.ml"), node("Div", ["s", "s"], ["y"])], WHOLE, True),
    ([node("Constant", [], ["c"], value_float=2.0), node("Div", ["x", "c"], ["y"])], FLOAT, True),
    ([node("Div", ["x", "x"], ["y"])], WHOLE, False),
    ([node("Mod", ["x", "x"], ["y"])], WHOLE, False),
    ([node("Cast", ["x"], ["c"], to=WHOLE), node("Div", ["c", "c"], ["y"])], FLOAT, False),
    ([node("ArgMax", ["x"], ["c"]), node("Div", ["c", "c"], ["y"])], FLOAT, False),
    ([node("TopK", ["x", "k"], ["v", "i"]), node("Div", ["i", "i"], ["y"])], FLOAT, False),
    ([node("Where", ["x", "i", "i"], ["c"]), node("Div", ["c", "c"], ["y"])], FLOAT, False),
    ([node("DynamicQuantizeLinear", ["x"], ["c"]), node("Div", ["c", "c"], ["y"])], FLOAT, False),
    ([node("LabelEncoder", ["x"], ["c"], domain="ai.onnx.ml"), node("Div", ["c", "c"], ["y"])], FLOAT, False),
    (
        [
            node("TreeEnsembleClassifier", ["x"], ["c", "p"], domain="ai.onnx.ml"),
            node("Div", ["c", "c"], ["y"]),
        ],
        FLOAT,
        False,
    ),
    (
        [
            node("Constant", [], ["c"], value_int=2),
            node("Add", ["k", "c"], ["d"]),
            node("Div", ["d", "d"], ["y"]),
        ],
        FLOAT,
        False,
    ),
]


@pytest.mark.parametrize(("nodes", "kind", "bounded"), DIVISIONS)
def test_only_floating_point_numbers_are_divided_in_the_server(nodes: Any, kind: int, bounded: bool) -> None:
    """The smallest whole number divided by -1 ends the process, with the requests of everybody else."""
    weights = {"half": HALF, "k": np.array([1]), "i": np.array([1])}
    content = model(nodes, {"x": [2]}, {"y": [2]}, kind=kind, weights=weights).SerializeToString()

    assert (reason_unbounded(content) is None) is bounded


def test_a_type_that_is_given_twice_counts_as_both() -> None:
    graph = model([node("Div", ["x", "x"], ["y"])], {"x": [1]}, {"y": [1]}, kind=FLOAT)
    graph.graph.input.append(helper.make_tensor_value_info("x", WHOLE, [1]))

    assert reason_unbounded(graph.SerializeToString()) is not None


def branching() -> onnx.ModelProto:
    branch = helper.make_graph(
        [node("Identity", ["x"], ["z"])],
        "branch",
        [],
        [helper.make_tensor_value_info("z", TensorProto.BOOL, [1])],
    )
    return model(
        [node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)],
        {"x": [1]},
        {"y": [1]},
        kind=TensorProto.BOOL,
    )


def with_function() -> onnx.ModelProto:
    loop = counting().graph.node[0]
    function = helper.make_function(
        "mine", "Count", ["x", "zero", "one"], ["y"], [loop], [helper.make_opsetid("", 17)]
    )
    return model(
        [node("Count", ["x", "x", "x"], ["y"], domain="mine")], {"x": [1]}, {"y": [1]}, functions=[function]
    )


def with_plain_name() -> onnx.ModelProto:
    """A function that is called like an operator."""
    function = helper.make_function(
        "com.microsoft", "Gelu", ["x"], ["y"], [filling().graph.node[0]], [helper.make_opsetid("", 17)]
    )
    return model(
        [node("Gelu", ["x"], ["y"], domain="com.microsoft")], {"x": [1]}, {"y": [1]}, functions=[function]
    )


@pytest.mark.parametrize("make", [counting, filling, branching, with_function, with_plain_name])
def test_loops_branches_and_functions_are_not(make: Any) -> None:
    assert reason_unbounded(make().SerializeToString()) is not None


def test_what_loading_would_compute_from_constants_is_not() -> None:
    """ONNX Runtime computes it when the model is opened: two weights of a million values, a million times a million."""
    nodes = [node("Add", ["row", "column"], ["square"]), node("Add", ["x", "square"], ["y"])]
    weights = {"row": np.zeros((1, 8)), "column": np.zeros((8, 1))}
    content = model(nodes, {"x": [1]}, {"y": [8, 8]}, kind=TensorProto.DOUBLE, weights=weights)

    assert "constants alone" in str(reason_unbounded(content.SerializeToString()))


# ------------------------------------------------------------------------------------------ files that lie


def test_a_weight_that_claims_more_than_it_has_is_not() -> None:
    content = outer_sum()
    content.graph.initializer.append(
        TensorProto(name="w", data_type=1, dims=[10**6, 10**6], raw_data=b"1234")
    )

    assert "larger than its bytes" in str(reason_unbounded(content.SerializeToString()))


def test_a_sparse_weight_is_not() -> None:
    content = outer_sum()
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    indices = numpy_helper.from_array(np.zeros(1, np.int64))
    content.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [10**9]))

    assert "sparse" in str(reason_unbounded(content.SerializeToString()))


def test_a_graph_in_two_parts_counts_as_one() -> None:
    """Parsers merge a field that is given twice."""
    plain = outer_sum().SerializeToString()
    more = onnx.ModelProto(graph=filling().graph).SerializeToString()

    assert reason_unbounded(plain + more) is not None
    assert reason_unbounded(more + plain) is not None


def test_an_operator_that_is_named_twice_counts_as_both() -> None:
    name = helper.make_node("Relu", ["x"], ["y"])
    twice = name.SerializeToString() + onnx.NodeProto(op_type="Loop").SerializeToString()
    graph = b"\x0a" + bytes([len(twice)]) + twice

    assert reason_unbounded(b"\x3a" + bytes([len(graph)]) + graph) is not None


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"\x3a\xff", b"\x3b\x3c", b"\x00\x00", b"\xba\x80\x80\x80\x80\x01\x00"]
)
def test_what_cannot_be_read_is_not(content: bytes) -> None:
    assert reason_unbounded(content) is not None


def test_a_model_that_was_cut_anywhere_is_not() -> None:
    whole = counting().SerializeToString()

    for size in range(len(whole)):
        assert reason_unbounded(whole[:size]) is not None
