"""Candidates for measurement: the registered original and its variants, each as a function from rows to scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from falaj.errors import InvalidInput
from falaj.optimization.runtime.conversion.converted import FEATURE_NAMES, Array
from falaj.optimization.runtime.sessions import open_session, tensor_specs
from falaj.records.registry import TensorSpec

Predict = Callable[[Array], Array]

ONNX = b"\x08"
"""The first byte of an ONNX file: the tag of its format version."""
ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class Candidate:
    """A model with a predict function. `content` is its ONNX file, or `source` the model to export."""

    name: str
    predict: Predict
    size_bytes: int
    content: bytes | None = None
    source: Any = None


def open_original(folder: Path) -> Candidate:
    """Open the model in the job's inputs: ONNX, XGBoost or a torch export."""
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    for path in files:
        content = path.read_bytes()
        if path.suffix == ".onnx" or content.startswith(ONNX):
            return onnx_candidate("original", content)
        if content[:1] == b"{" and b"learner" in content[:64]:
            return _xgboost(content)
        if content.startswith(ZIP):
            return _torch(path)
    raise InvalidInput.at(
        "model",
        given=", ".join(path.name for path in files[:20]) or "no files",
        allowed="model.onnx, a model of XGBoost (.json, .ubj) or a torch export (.pt2)",
        fix="register the model with fj.save_model, which writes ONNX",
    )


def onnx_candidate(name: str, content: bytes) -> Candidate:
    """Open an ONNX model in ONNX Runtime."""
    session = open_session(content)
    inputs = session.get_inputs()
    if len(inputs) != 1:
        raise InvalidInput.at(
            "model",
            given=f"inputs {', '.join(each.name for each in inputs)}",
            allowed="one input of [rows, features]",
            fix="export it so with fj.export_onnx",
        )
    spec = tensor_specs(inputs)[0]
    if spec.dtype not in ("float32", "float64"):
        raise InvalidInput.at(f"model input {spec.name}", given=spec.dtype, allowed="float32 or float64")
    output = _scores_of(tensor_specs(session.get_outputs()))
    dtype = np.dtype(spec.dtype)

    def predict(rows: Array) -> Array:
        made: Array = session.run([output], {spec.name: rows.astype(dtype, copy=False)})[0]
        return made

    return Candidate(name, predict, len(content), content)


def require_width(candidate: Candidate, features: Array) -> None:
    """Raise InvalidInput if the model takes another number of columns."""
    try:
        candidate.predict(features[:1])
    except InvalidInput:
        raise
    except Exception as error:  # each framework has its own
        raise InvalidInput.at(
            "features",
            given=f"{features.shape[1]} columns: {str(error).strip().splitlines()[0]}",
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


def _xgboost(content: bytes) -> Candidate:
    from falaj.optimization.runtime.conversion.from_xgboost import load_booster

    booster = load_booster(content)
    booster.set_param({"nthread": 1})

    def predict(rows: Array) -> Array:
        return np.asarray(booster.inplace_predict(rows, validate_features=False))

    return Candidate("original", predict, len(content), source=booster)


def _torch(path: Path) -> Candidate:
    """Open a torch export; the registry has checked that it contains no pickle."""
    import torch

    torch.set_num_threads(1)
    program = torch.export.load(str(path))
    module = program.module()

    def predict(rows: Array) -> Array:
        with torch.inference_mode():
            made: Array = module(torch.from_numpy(rows)).numpy()
        return made

    return Candidate("original", predict, path.stat().st_size, source=program)
