"""Export a trained model to ONNX, verify its predictions, and save it as the output of a job."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from falaj.errors import Fault, InvalidInput
from falaj.extras import requiring_packages
from falaj.optimization.runtime.conversion.converted import Array, ConvertedModel, framework_of
from falaj.records.registry import TensorSpec

MODEL = "model/model.onnx"
DESCRIPTION = "model.json"
EXAMPLE = "model/example.json"
EXAMPLE_ROWS = 100
INTEGERS = ("int64", "int32", "bool")
TOLERANCE = 1e-4
"""Largest difference from the model's own prediction: absolute, or relative for values beyond 1."""


@dataclass(frozen=True)
class ExportedModel:
    """The exported file, its inputs and outputs, and its largest difference from the model on the sample."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_difference: float
    rows: int


def export_onnx(
    model: Any,
    path: str | Path,
    *,
    sample: Any,
    names: Sequence[str] | None = None,
    tolerance: float = TOLERANCE,
) -> ExportedModel:
    """Write `model` to `path` as ONNX: a torch module or exported program, a scikit-learn estimator, XGBoost, CatBoost,
    or an `onnx.ModelProto`.

    The file has one input, `features`, with a dynamic number of rows. A binary classifier returns the probability of
    the second class as one column; other classifiers one column per class. A model that is ONNX already keeps its
    names. The file must agree with the model on `sample`, rows that the model takes, and on the first of them alone.
    `names` are its column names, unless the sample or the model has them.
    """
    kind = framework_of(model)
    rows = _rows_of(sample, any_shape=kind in ("torch", "onnx"))
    columns = _column_names(names, sample, model, rows)
    with requiring_packages(for_=f"an export of {kind}"):
        converted = _convert(kind, model, rows, columns)
    difference = _agreement(converted, rows, tolerance=tolerance)
    target = Path(path)
    _write(target, converted.content)
    inputs = tuple(spec.model_copy(update={"features": columns}) for spec in converted.inputs)
    return ExportedModel(target, inputs, converted.outputs, difference, len(rows))


def save_model(
    model: Any,
    *,
    sample: Any,
    names: Sequence[str] | None = None,
    metrics: Mapping[str, float] | None = None,
    card: str = "",
    licence: str | None = None,
    example: Any = None,
    measurements: Mapping[str, Mapping[str, float]] | None = None,
) -> ExportedModel:
    """Export `model` as ONNX to the job's outputs, or to ./outputs outside a job, and describe it in model.json.

    Registration reads its inputs, outputs, `metrics`, `card` and `licence` (an SPDX expression) from there. `example`
    are a few rows that become a file of the version, as a request of the Open Inference Protocol: whoever may read the
    version can read them. `measurements` are metrics by the name of the job's input that they were measured on.
    """
    values = _finite("metrics", metrics or {})
    measured = {name: _finite(f"measurements.{name}", each) for name, each in (measurements or {}).items()}
    outputs = Path(os.environ.get("FALAJ_OUTPUTS") or "outputs")
    exported = export_onnx(model, outputs / MODEL, sample=sample, names=names)
    described = {
        "files": [MODEL],
        "inputs": [spec.model_dump(mode="json") for spec in exported.inputs],
        "outputs": [spec.model_dump(mode="json") for spec in exported.outputs],
        "metrics": values,
        "card": card,
        "licence": licence,
        "measurements": measured,
    }
    if example is not None:
        _write(outputs / EXAMPLE, _as_request(example, exported.inputs[0]))
        described |= {"files": [MODEL, EXAMPLE], "example": EXAMPLE}
    _write(outputs / DESCRIPTION, json.dumps(described, indent=2).encode())
    return exported


def _as_request(example: Any, spec: TensorSpec) -> bytes:
    """Return rows as the body of an inference request."""
    rows = _rows_of(example, any_shape=len(spec.shape) != 2)
    if len(rows) > EXAMPLE_ROWS:
        raise InvalidInput.at("example", given=f"{len(rows)} rows", allowed=f"at most {EXAMPLE_ROWS} rows")
    if not np.isfinite(rows).all():
        raise InvalidInput.at("example", given="NaN or an infinity", allowed="rows without missing values")
    datatype = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}[str(rows.dtype)]
    tensor = {
        "name": spec.name,
        "shape": list(rows.shape),
        "datatype": datatype,
        "data": rows.ravel().tolist(),
    }
    return json.dumps({"inputs": [tensor]}).encode()


def _finite(where: str, metrics: Mapping[str, float]) -> dict[str, float]:
    values = {name: float(value) for name, value in metrics.items()}
    for name, value in values.items():
        if value != value or abs(value) == float("inf"):
            raise InvalidInput.at(f"{where}.{name}", given=value, allowed="a finite number")
    return values


def _rows_of(sample: Any, *, any_shape: bool) -> Array:
    """Return `sample` as float32 rows; with `any_shape` integers stay integers, as torch may use them as indices."""
    if isinstance(sample, tuple | dict):
        raise InvalidInput.at(
            "sample",
            given=f"a {type(sample).__name__} of {len(sample)}",
            allowed="one array of rows",
            fix="make the model take one tensor [rows, features] and split it inside",
        )
    plain = sample.detach().cpu() if hasattr(sample, "detach") else sample
    try:
        array = np.asarray(plain)
        keep = any_shape and str(array.dtype) in INTEGERS
        rows = array if keep else array.astype(np.float32)
    except (TypeError, ValueError) as error:
        fix = "encode text and categories as numbers before the model"
        raise InvalidInput.at("sample", given=str(error), allowed="numbers", fix=fix) from None
    if rows.ndim < 1 or len(rows) == 0 or (rows.ndim != 2 and not any_shape):
        raise InvalidInput.at(
            "sample", given=f"shape {list(rows.shape)}", allowed="[rows, features] with at least one row"
        )
    return np.ascontiguousarray(rows)


def _column_names(given: Sequence[str] | None, sample: Any, model: Any, rows: Array) -> tuple[str, ...]:
    """Return the column names: as given, else of the sample, else of the model's training data, else none."""
    found = given
    if found is None and hasattr(sample, "columns"):
        found = [str(name) for name in sample.columns]
    if found is None:
        found = _trained_on(model)
    if found is None:
        return ()
    if rows.ndim != 2 or len(found) != rows.shape[1] or len(set(found)) != len(found):
        raise InvalidInput.at(
            "names",
            given=f"{len(found)} names, {len(set(found))} of them unique",
            allowed=f"a name for each column of the sample, which has the shape {list(rows.shape)}",
        )
    return tuple(found)


def _trained_on(model: Any) -> list[str] | None:
    try:
        found = getattr(model, "feature_names_in_", None)
    except AttributeError:  # raised by XGBoost for a model that was trained without names
        found = None
    if found is None:
        found = getattr(model, "feature_names", None)
    if found is None:  # CatBoost calls columns without names 0, 1, …
        found = getattr(model, "feature_names_", None)
        found = None if found is not None and list(found) == [str(i) for i in range(len(found))] else found
    return None if found is None else [str(name) for name in found]


def _convert(kind: str, model: Any, rows: Array, columns: tuple[str, ...]) -> ConvertedModel:
    """Convert the model; a framework is imported only for its own models."""
    if kind == "torch":
        from falaj.optimization.runtime.conversion import from_torch

        return from_torch.convert(model, rows, columns)
    if kind == "xgboost":
        from falaj.optimization.runtime.conversion import from_xgboost

        return from_xgboost.convert(model, rows, columns)
    if kind == "catboost":
        from falaj.optimization.runtime.conversion import from_catboost

        return from_catboost.convert(model, rows, columns)
    if kind == "onnx":
        from falaj.optimization.runtime.conversion import from_onnx

        return from_onnx.convert(model, rows, columns)
    from falaj.optimization.runtime.conversion import from_sklearn

    return from_sklearn.convert(model, rows, columns)


def _agreement(converted: ConvertedModel, rows: Array, *, tolerance: float) -> float:
    """Return the largest difference on the sample, in one batch and for the first row. Raise beyond `tolerance`."""
    from falaj.optimization.runtime.sessions import open_session

    session = open_session(converted.content)
    name = session.get_inputs()[0].name
    worst = 0.0
    for part, references in ((rows, converted.references), (rows[:1], [r[:1] for r in converted.references])):
        try:
            outputs = session.run(None, {name: part})
        except Exception as error:  # onnxruntime raises a dozen types that share no parent but this
            raise _mismatch(
                f"{len(part)} rows", f"an error: {error}", "any number of rows", fix=converted.batch_fix
            ) from error
        for spec, output, reference in zip(converted.outputs, outputs, references, strict=True):
            worst = max(worst, largest_difference(spec.name, output, reference, tolerance))
    return worst


def largest_difference(name: str, output: Array, reference: Array, tolerance: float) -> float:
    """Return the largest difference of predictions. Raise InvalidInput, with its place, beyond `tolerance`."""
    if output.shape != reference.shape:
        raise _mismatch(f"output {name}", f"shape {list(output.shape)}", f"shape {list(reference.shape)}")
    wanted, made = reference.astype(np.float64), output.astype(np.float64)
    one_is_nan = np.isnan(wanted) != np.isnan(made)
    gap = np.where(np.isnan(wanted) | (wanted == made), 0.0, np.abs(made - wanted))
    gap[one_is_nan] = np.inf
    beyond = gap > tolerance * np.maximum(1.0, np.abs(np.nan_to_num(wanted)))
    if beyond.any():
        place = tuple(int(i) for i in np.unravel_index(np.argmax(gap), gap.shape))
        raise _mismatch(
            f"output {name} at {list(place)}",
            f"{made[place]:.6g} ({int(beyond.any(axis=tuple(range(1, gap.ndim))).sum())} of {len(gap)} rows differ)",
            f"{wanted[place]:.6g}, as the model predicts, within {tolerance:g}",
            fix="trees after a scaler often differ because of rounded thresholds; train them on unscaled columns",
        )
    return float(gap.max(initial=0.0))


def _mismatch(where: str, given: str, allowed: str, *, fix: str | None = None) -> InvalidInput:
    return InvalidInput(
        "the exported model predicts differently from the model; nothing was written",
        faults=[Fault(where=where, given=given, allowed=allowed, fix=fix)],
    )


def _write(path: Path, content: bytes) -> None:
    """Write atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_bytes(content)
    staged.replace(path)
