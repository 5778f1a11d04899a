"""Model files made by the real frameworks, for the tests of engines."""

from __future__ import annotations

import io
from typing import Any

import numpy as np


def rows(count: int = 64, width: int = 4, *, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def labels(given: Any, classes: int) -> Any:
    return np.digitize(given[:, 0] + 0.3 * given[:, 1], np.linspace(-1, 1, classes + 1)[1:-1])


def xgboost_booster(objective: str = "binary:logistic", *, classes: int = 2, **params: Any) -> Any:
    import xgboost as xgb

    given = rows(200)
    given[::7, 2] = np.nan
    target = labels(given, classes)
    if objective.startswith("multi"):
        params["num_class"] = classes
    data = xgb.DMatrix(given, label=target)
    return xgb.train(
        {"objective": objective, "max_depth": 3, "nthread": 1, **params}, data, num_boost_round=8
    )


def xgboost_bytes(booster: Any, kind: str = "ubj") -> bytes:
    return bytes(booster.save_raw(kind))


def lightgbm_booster(objective: str = "binary", *, classes: int = 2, **params: Any) -> Any:
    import lightgbm as lgb

    given = rows(200)
    given[::7, 2] = np.nan
    if objective == "multiclass":
        params["num_class"] = classes
    wanted = {"objective": objective, "verbosity": -1, "num_threads": 1, "num_leaves": 7, **params}
    return lgb.train(wanted, lgb.Dataset(given, label=labels(given, classes)), num_boost_round=8)


def lightgbm_bytes(booster: Any) -> bytes:
    return str(booster.model_to_string()).encode()


def torch_module(*, seed: int = 0) -> Any:
    import torch

    torch.manual_seed(seed)
    layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    return torch.nn.Sequential(*layers).eval()


def torch_bytes(module: Any, *examples: Any, has_dynamic_rows: bool = True) -> bytes:
    """Return a torch export without example inputs, which torch would pickle."""
    import torch

    n = torch.export.Dim("n")
    dynamic = tuple({0: n} for _ in examples) if has_dynamic_rows else None
    program = torch.export.export(module, examples, dynamic_shapes=dynamic)
    program._example_inputs = None
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getvalue()


def litert_bytes(weight: Any, bias: Any, *, rows: int = 1, has_dynamic_rows: bool = False) -> bytes:
    """Return a LiteRT model `x @ weight.T + bias`, written by the schema that its package brings."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    outputs, width = weight.shape
    model, graph = schema.ModelT(), schema.SubGraphT()
    model.version, model.description = 3, b"dense"
    model.buffers = []
    for content in (b"", weight.astype("<f4").tobytes(), bias.astype("<f4").tobytes()):
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(content, np.uint8) if content else None
        model.buffers.append(buffer)
    graph.tensors = []
    for name, shape, buffer in (
        ("x", [rows, width], 0),
        ("w", [outputs, width], 1),
        ("b", [outputs], 2),
        ("y", [rows, outputs], 0),
    ):
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.buffer = name.encode(), shape, buffer
        tensor.type = schema.TensorType.FLOAT32
        if has_dynamic_rows and name in "xy":
            tensor.shapeSignature = [-1, *shape[1:]]
        graph.tensors.append(tensor)
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.FULLY_CONNECTED
    code.version = 1
    model.operatorCodes = [code]
    operator = schema.OperatorT()
    operator.opcodeIndex, operator.inputs, operator.outputs = 0, [0, 1, 2], [3]
    operator.builtinOptionsType = schema.BuiltinOptions.FullyConnectedOptions
    operator.builtinOptions = schema.FullyConnectedOptionsT()
    graph.inputs, graph.outputs, graph.operators, graph.name = [0], [3], [operator], b"main"
    model.subgraphs = [graph]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())
