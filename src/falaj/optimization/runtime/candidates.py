"""Candidates for measurement: the registered original and its variants, each as a function from rows to scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from falaj.errors import InvalidInput
from falaj.optimization.runtime.conversion.converted import FEATURE_NAMES, Array
from falaj.optimization.runtime.evaluation_data import InputShape
from falaj.optimization.runtime.sessions import open_session, tensor_specs
from falaj.records.optimization import Device
from falaj.records.registry import Dtype, TensorSpec

Predict = Callable[[Array], Array]

ONNX = b"\x08"
"""The first byte of an ONNX file: the tag of its format version."""
ZIP = b"PK\x03\x04"
LITERT = b"TFL3"
"""Bytes 4 to 8 of a LiteRT file."""
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
    if content[4:8] == LITERT:
        return litert_candidate(name, content, path=path)
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


def litert_candidate(name: str, content: bytes, *, path: Path | None = None) -> Candidate:
    """Open a LiteRT model on one thread, which takes rows as in the model server: a fixed number of them, or any."""
    from ai_edge_litert.interpreter import Interpreter

    try:
        interpreter = Interpreter(model_content=content, num_threads=1)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        raise InvalidInput(f"the LiteRT model cannot be opened: {reason}") from error
    (entry, *others), outputs = interpreter.get_input_details(), interpreter.get_output_details()
    if others:
        raise InvalidInput.at("model", given=f"{len(others) + 1} inputs", allowed="one tensor [rows, …]")
    inputs, made = _litert_specs([entry]), _litert_specs(outputs)
    scores = next(each["index"] for each in outputs if each["name"] == _scores_of(made))
    rows_at_once, size = inputs[0].shape[0], int(entry["shape"][0])

    def run(rows: Array) -> Array:
        nonlocal size
        if len(rows) != size:
            interpreter.resize_tensor_input(entry["index"], rows.shape)
            interpreter.allocate_tensors()
            size = len(rows)
        interpreter.set_tensor(entry["index"], rows)
        interpreter.invoke()
        found: Array = interpreter.get_tensor(scores)
        return found

    def predict(rows: Array) -> Array:
        if rows_at_once < 0:
            return run(rows)
        parts = [rows[start : start + rows_at_once] for start in range(0, len(rows), rows_at_once)]
        filled = [part if len(part) == rows_at_once else np.resize(part, entry["shape"]) for part in parts]
        return np.concatenate([run(part) for part in filled])[: len(rows)]

    declared = tuple(each.model_copy(update={"shape": (-1, *each.shape[1:])}) for each in inputs)
    answers = tuple(each.model_copy(update={"shape": (-1, *each.shape[1:])}) for each in made)
    shape = InputShape(declared[0].shape[1:], declared[0].dtype)
    return Candidate(name, predict, len(content), shape, path=path, inputs=declared, outputs=answers)


def _litert_specs(details: Any) -> tuple[TensorSpec, ...]:
    """Return the tensors of a LiteRT model; a dimension that its file calls dynamic is -1."""
    found = []
    for each in details:
        signature = each.get("shape_signature")
        shape = each["shape"] if signature is None or len(signature) == 0 else signature
        dtype = cast(Dtype, np.dtype(each["dtype"]).name)
        found.append(TensorSpec(name=each["name"], dtype=dtype, shape=tuple(int(size) for size in shape)))
    return tuple(found)


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
