"""Convert XGBoost models to ONNX."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import xgboost as xgb

from falaj.errors import InvalidInput, shorten
from falaj.optimization.runtime.conversion.converted import (
    FEATURES,
    Array,
    ConvertedModel,
    invalid_sample,
    not_convertible,
)
from falaj.optimization.runtime.conversion.onnx_graphs import converted_model, keep_output

OPSET = 15


def convert(model: Any, rows: Array, columns: tuple[str, ...]) -> ConvertedModel:
    """Convert a booster or an XGBoost estimator. Missing values are NaN, as in XGBoost."""
    booster = _used_part(model)
    _require_numbers(booster)
    reference = _reference(model, rows)
    made = _to_onnx(booster, rows.shape[1])
    output = made.graph.output[-1].name
    is_classifier = len(made.graph.output) == 2
    classes = max(2, _classes(booster)) if is_classifier else 0
    if classes == 2:
        keep_output(made, output, name="probability", width=1, second=True)
        reference = reference[:, -1:]
    elif classes:
        keep_output(made, output, name="probabilities", width=classes)
    else:
        keep_output(made, output, name="prediction", width=reference.shape[1])
    return converted_model(made, [reference], columns)


def load_booster(content: bytes) -> Any:
    """Load a booster from XGBoost JSON or UBJSON; neither can run code."""
    booster = xgb.Booster()
    try:
        booster.load_model(bytearray(content))
    except xgb.core.XGBoostError as error:
        raise InvalidInput(f"invalid XGBoost model: {str(error).splitlines()[0]}") from None
    return booster


def _used_part(model: Any) -> Any:
    """Return a copy of the trees used for prediction, without column names: the converter accepts f0, f1, … only."""
    if isinstance(model, xgb.XGBModel):
        booster = model.get_booster()
        if getattr(model, "early_stopping_rounds", None) and model.best_iteration is not None:
            booster = booster[: model.best_iteration + 1]
    elif isinstance(model, xgb.Booster):
        booster = model
    else:
        raise InvalidInput.at(
            "model", given=type(model).__name__, allowed="a Booster or an estimator of XGBoost"
        )
    types = booster.feature_types
    copy = load_booster(bytes(booster.save_raw("ubj")))
    copy.feature_names, copy.feature_types = None, types if types and "c" in types else None
    return copy


def _require_numbers(booster: Any) -> None:
    if booster.feature_types:
        raise not_convertible(
            "XGBoost",
            given="splits on categories",
            allowed="splits on numbers, which ONNX trees have",
            fix="encode the categories as numbers, and train without enable_categorical",
        )
    kind = _config(booster)["learner"]["gradient_booster"]["name"]
    if kind != "gbtree":
        raise not_convertible(
            "XGBoost", given=f"booster {kind}", allowed="boosted trees", fix='train with booster="gbtree"'
        )


def _reference(model: Any, rows: Array) -> Array:
    try:
        if isinstance(model, xgb.XGBClassifier):
            predicted = model.predict_proba(rows)
        elif isinstance(model, xgb.XGBModel):
            predicted = model.predict(rows)
        else:
            predicted = model.predict(xgb.DMatrix(rows, feature_names=model.feature_names))
    except (ValueError, xgb.core.XGBoostError) as error:
        raise invalid_sample(error) from error
    predicted = np.asarray(predicted)
    return predicted if predicted.ndim == 2 else predicted.reshape(len(rows), -1)


def _to_onnx(booster: Any, width: int) -> Any:
    from onnxmltools.convert import convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType

    types = [(FEATURES, FloatTensorType([None, width]))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return convert_xgboost(booster, initial_types=types, target_opset=OPSET)
    except Exception as error:  # the converter may raise anything
        objective = _config(booster)["learner"]["objective"]["name"]
        raise not_convertible(
            f"XGBoost, objective {objective}",
            given=shorten(f"{type(error).__name__}: {error}", limit=300),
            allowed="boosted trees with an objective that onnxmltools knows",
            fix="train with binary:logistic, multi:softprob or reg:squarederror",
        ) from error


def _classes(booster: Any) -> int:
    return int(_config(booster)["learner"]["learner_model_param"]["num_class"])


def _config(booster: Any) -> Any:
    return json.loads(booster.save_config())
