"""Candidates for measurement: the registered original and its variants, each as a function from rows to scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from falaj.errors import InvalidInput
from falaj.optimization.runtime.conversion.converted import FEATURE_NAMES, Array
from falaj.optimization.runtime.evaluation_data import InputShape
from falaj.optimization.runtime.sessions import open_session, tensor_specs
from falaj.records.optimization import Device
from falaj.records.registry import TensorSpec

Predict = Callable[[Array], Array]

ONNX = b"\x08"
"""The first byte of an ONNX file: the tag of its format version."""
ZIP = b"PK\x03\x04"
DTYPES = ("float32", "float64", "int32", "int64")
"""What the input of a model may hold; whole numbers are indices, such as tokens."""


@dataclass(frozen=True)
class Candidate:
    """A model with a predict function, in `path`. `content` is its ONNX file, or `source` the model to export."""

    name: str
    predict: Predict
    size_bytes: int
    input: InputShape
    content: bytes | None = None
    source: Any = None
    path: Path | None = None
    device: Device = "cpu"
    inputs: tuple[TensorSpec, ...] = field(default=())
    outputs: tuple[TensorSpec, ...] = field(default=())


def open_original(folder: Path) -> Candidate:
    """Open the model in the job's inputs: ONNX, XGBoost or a torch export."""
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    for path in files:
        found = open_candidate("original", path)
        if found is not None:
            return found
    raise InvalidInput.at(
        "model",
        given=", ".join(path.name for path in files[:20]) or "no files",
        allowed="model.onnx, a model of XGBoost (.json, .ubj) or a torch export (.pt2)",
        fix="register the model with fj.save_model, which writes ONNX",
    )


def open_candidate(name: str, path: Path) -> Candidate | None:
    """Open the model in a file; None if it is of no known format."""
    content = path.read_bytes()
    if path.suffix == ".onnx" or content.startswith(ONNX):
        return onnx_candidate(name, content, path=path)
    if content[:1] == b"{" and b"learner" in content[:64]:
        return _xgboost(name, content, path)
    if content.startswith(ZIP):
        return _torch(name, path)
    return None


def onnx_candidate(
    name: str, content: bytes, *, path: Path | None = None, provider: str = "CPUExecutionProvider"
) -> Candidate:
    """Open an ONNX model in ONNX Runtime."""
    session = open_session(content, provider=provider)
    inputs, outputs = tensor_specs(session.get_inputs()), tensor_specs(session.get_outputs())
    if len(inputs) != 1:
        raise InvalidInput.at(
            "model",
            given=f"inputs {', '.join(each.name for each in inputs)}",
            allowed="one input of [rows, …]",
            fix="export it so with fj.export_onnx",
        )
    spec = inputs[0]
    if spec.dtype not in DTYPES or not spec.shape:
        raise InvalidInput.at(
            f"model input {spec.name}",
            given=f"{spec.dtype} {list(spec.shape)}",
            allowed=f"{', '.join(DTYPES)}, with a dimension for the rows",
        )
    output = _scores_of(outputs)

    def predict(rows: Array) -> Array:
        made: Array = session.run([output], {spec.name: rows})[0]
        return made

    return Candidate(
        name,
        predict,
        len(content),
        InputShape(spec.shape[1:], spec.dtype),
        content,
        path=path,
        device="cpu" if provider == "CPUExecutionProvider" else "gpu",
        inputs=inputs,
        outputs=outputs,
    )


def require_width(candidate: Candidate, features: Array) -> None:
    """Raise InvalidInput if the model takes another number of columns."""
    try:
        candidate.predict(features[:1])
    except InvalidInput:
        raise
    except Exception as error:  # each framework has its own
        raise InvalidInput.at(
            "features",
            given=f"{int(np.prod(features.shape[1:]))} columns: {str(error).strip().splitlines()[0]}",
            allowed="the columns that the model takes, in order",
        ) from error


def named_columns(content: bytes) -> tuple[str, ...]:
    """Return the column names in the metadata of an ONNX file."""
    kept = open_session(content).get_modelmeta().custom_metadata_map.get(FEATURE_NAMES)
    return tuple(json.loads(kept)) if kept else ()


def _scores_of(outputs: tuple[TensorSpec, ...]) -> str:
    """Return the name of the score output: the only one with floating-point numbers."""
    real = [each.name for each in outputs if each.dtype in ("float32", "float64", "float16")]
    if len(real) != 1:
        raise InvalidInput.at(
            "model",
            given=f"outputs {', '.join(f'{each.name} ({each.dtype})' for each in outputs)}",
            allowed="one output of real numbers",
            fix="export it so with fj.export_onnx",
        )
    return real[0]


def _xgboost(name: str, content: bytes, path: Path) -> Candidate:
    from falaj.optimization.runtime.conversion.from_xgboost import load_booster

    booster = load_booster(content)
    booster.set_param({"nthread": 1})

    def predict(rows: Array) -> Array:
        return np.asarray(booster.inplace_predict(rows, validate_features=False))

    shape = InputShape((-1,), "float32")
    return Candidate(name, predict, len(content), shape, source=booster, path=path)


def _torch(name: str, path: Path) -> Candidate:
    """Open a torch export; the registry has checked that it contains no pickle."""
    import torch

    torch.set_num_threads(1)
    try:
        program = torch.export.load(str(path))
        module = program.module()
    except Exception as error:  # torch.export raises what it likes for a file that is not its own
        reason = next(iter(str(error).strip().splitlines()), "")
        raise InvalidInput(
            f"the torch export {path.name} cannot be opened: {type(error).__name__}: {reason}"
        ) from error

    def predict(rows: Array) -> Array:
        with torch.inference_mode():
            made: Array = module(torch.from_numpy(rows)).numpy()
        return made

    return Candidate(name, predict, path.stat().st_size, program_input(program), source=program, path=path)


def program_input(program: Any) -> InputShape:
    """Return the only input of an exported program."""
    wanted = program.graph_signature.user_inputs
    tensors = [node.meta["val"] for node in program.graph.nodes if node.name in wanted and "val" in node.meta]
    if len(tensors) != 1 or not tensors[0].shape:
        raise InvalidInput.at(
            "model", given=f"{len(tensors)} inputs", allowed="one tensor [rows, …]", fix="export it so"
        )
    row = tuple(size if isinstance(size, int) else -1 for size in tensors[0].shape[1:])
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise InvalidInput.at("model input", given=dtype, allowed=", ".join(DTYPES))
    return InputShape(row, dtype)
