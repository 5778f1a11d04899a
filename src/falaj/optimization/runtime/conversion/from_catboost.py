"""Convert CatBoost models to ONNX, by CatBoost's own writer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from falaj.errors import InvalidInput, shorten
from falaj.optimization.runtime.conversion.converted import (
    Array,
    ConvertedModel,
    invalid_sample,
    not_convertible,
)
from falaj.optimization.runtime.conversion.onnx_graphs import converted_model, keep_output

CLASSIFIER = "TreeEnsembleClassifier"


def convert(model: Any, rows: Array, columns: tuple[str, ...]) -> ConvertedModel:
    """Convert a fitted classifier or regressor of numeric features. Missing values are NaN."""
    if not model.is_fitted():
        raise InvalidInput.at("model", given="a CatBoost model that is not fitted", allowed="a fitted one")
    made = _to_onnx(model)
    trees = next((node for node in made.graph.node if node.op_type == CLASSIFIER), None)
    reference = _reference(model, rows, is_classifier=trees is not None)
    if trees is None:
        keep_output(made, made.graph.output[0].name, name="prediction", width=reference.shape[1])
    elif reference.shape[1] == 2:
        keep_output(made, trees.output[1], name="probability", width=1, second=True)
        reference = reference[:, 1:]
    else:
        keep_output(made, trees.output[1], name="probabilities", width=reference.shape[1])
    return converted_model(made, [reference], columns)


def _to_onnx(model: Any) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:  # it writes to a path only
        path = Path(folder) / "model.onnx"
        try:
            model.save_model(str(path), format="onnx")
            made = onnx.load(path)
        except Exception as error:  # CatBoost raises its own type for everything
            raise not_convertible(
                "CatBoost",
                given=shorten(
                    str(error).strip().splitlines()[0] if str(error).strip() else repr(error), limit=300
                ),
                allowed="trees of numeric features, which ONNX has",
                fix="encode categories and text as numbers, and class labels as numbers or text, not as booleans",
            ) from error
    for node in [node for node in made.graph.node if node.op_type == "ZipMap"]:
        made.graph.node.remove(node)  # it makes a list of maps, which is no tensor
    if not any(each.domain == "" for each in made.opset_import):
        made.opset_import.append(onnx.helper.make_opsetid("", 13))
    return made


def _reference(model: Any, rows: Array, *, is_classifier: bool) -> Array:
    try:
        kind = "Probability" if is_classifier else "RawFormulaVal"
        predicted = np.asarray(model.predict(rows, prediction_type=kind))
    except Exception as error:
        raise invalid_sample(error) from error
    return predicted if predicted.ndim == 2 else predicted.reshape(len(rows), -1)
