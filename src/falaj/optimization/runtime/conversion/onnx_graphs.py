"""Edits of ONNX graphs: select an output, name the columns, remove dead nodes."""

from __future__ import annotations

import json
from typing import Any

import onnx
from onnx import TensorProto, helper

from falaj.optimization.runtime.conversion.converted import FEATURE_NAMES, Array, ConvertedModel


def converted_model(
    model: onnx.ModelProto, references: list[Array], columns: tuple[str, ...], *, batch_fix: str | None = None
) -> ConvertedModel:
    """Return `model` with its column names in the metadata, and its tensors as ONNX Runtime reports them."""
    from falaj.optimization.runtime.sessions import open_session, tensor_specs

    if columns:
        helper.set_model_props(model, {FEATURE_NAMES: json.dumps(columns)})
    content = model.SerializeToString()
    session = open_session(content)
    inputs, outputs = tensor_specs(session.get_inputs()), tensor_specs(session.get_outputs())
    return ConvertedModel(content, inputs, outputs, references, batch_fix)


def keep_output(model: onnx.ModelProto, output: str, *, name: str, width: int, second: bool = False) -> None:
    """Make `output` the only output, renamed to `name`, with `width` columns; `second` keeps its second column only."""
    graph = model.graph
    if second:
        graph.initializer.append(helper.make_tensor("falaj_second", TensorProto.INT64, [1], [1]))
        graph.node.append(helper.make_node("Gather", [output, "falaj_second"], [name], axis=1))
    else:
        _rename(graph, output, name)
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, width]))
    _drop_dead_nodes(graph)


def _rename(graph: Any, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new


def _drop_dead_nodes(graph: Any) -> None:
    while True:
        used = {name for node in graph.node for name in node.input} | {each.name for each in graph.output}
        dead = [node for node in graph.node if not used & set(node.output)]
        if not dead:
            return
        for node in dead:
            graph.node.remove(node)


def operators(model: onnx.ModelProto) -> set[str]:
    """Return the operators of the graph."""
    return {node.op_type for node in model.graph.node}
