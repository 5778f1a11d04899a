"""ONNX Runtime sessions with the options of the model server, so that measurements match serving."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort

from falaj.errors import InvalidInput
from falaj.records.registry import Dtype, TensorSpec

DTYPES: dict[str, Dtype] = {
    "tensor(bool)": "bool",
    "tensor(string)": "string",
    "tensor(int8)": "int8",
    "tensor(int16)": "int16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(uint8)": "uint8",
    "tensor(uint16)": "uint16",
    "tensor(uint32)": "uint32",
    "tensor(uint64)": "uint64",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
}


def open_session(
    content: bytes,
    *,
    optimized_path: str | None = None,
    level: str = "ORT_ENABLE_EXTENDED",
    provider: str = "CPUExecutionProvider",
) -> Any:
    """Open a single-threaded session. `optimized_path` is the file for its graph, optimized up to `level`."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    if optimized_path is not None:
        options.optimized_model_filepath = optimized_path
        # A higher level than extended would tie the file to this CPU type.
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    try:
        return ort.InferenceSession(content, options, providers=[provider])
    except Exception as error:  # onnxruntime raises a dozen types that share no parent but this
        raise InvalidInput(f"the ONNX model cannot be opened: {error}") from error


def tensor_specs(nodes: Any) -> tuple[TensorSpec, ...]:
    """Return the specs of a session's inputs or outputs."""
    return tuple(_spec(node) for node in nodes)


def _spec(node: Any) -> TensorSpec:
    dtype = DTYPES.get(node.type)
    if dtype is None:
        raise InvalidInput.at(
            f"tensor {node.name}",
            given=node.type,
            allowed="plain tensors",
            fix="export again; for scikit-learn with zipmap off",
        )
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape or ())
    return TensorSpec(name=node.name, dtype=dtype, shape=shape)
