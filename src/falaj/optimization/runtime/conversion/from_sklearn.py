"""Convert scikit-learn models to ONNX."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from falaj.errors import InvalidInput, shorten
from falaj.optimization.runtime.conversion.converted import (
    ALLOWED,
    FEATURES,
    Array,
    ConvertedModel,
    invalid_sample,
    not_convertible,
)
from falaj.optimization.runtime.conversion.onnx_graphs import converted_model, keep_output

OPSETS = {"": 21, "ai.onnx.ml": 3}
_patching = threading.RLock()


def convert(model: Any, rows: Array, columns: tuple[str, ...]) -> ConvertedModel:
    """Convert a fitted classifier with probabilities, a regressor, or a pipeline that ends in one."""
    reference = _reference(model, rows, columns)
    made = _to_onnx(model, rows.shape[1])
    classes = reference.shape[1] if _is_classifier(model) else 0
    output = made.graph.output[-1].name
    if classes == 2:
        keep_output(made, output, name="probability", width=1, second=True)
        reference = reference[:, 1:]
    elif classes:
        keep_output(made, output, name="probabilities", width=classes)
    else:
        keep_output(made, output, name="prediction", width=reference.shape[1])
    return converted_model(made, [reference], columns)


def _reference(model: Any, rows: Array, columns: tuple[str, ...]) -> Array:
    """Return the predictions of the model as a matrix."""
    predict = _predictor(model)
    given: Any = rows
    if columns and hasattr(model, "feature_names_in_"):
        pandas: Any = import_module("pandas")  # present, as the model was trained on named columns
        given = pandas.DataFrame(rows, columns=[*columns])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            predicted = np.asarray(predict(given))
    except Exception as error:  # third-party estimators may raise anything
        raise invalid_sample(error) from error
    return predicted if predicted.ndim == 2 else predicted.reshape(len(rows), -1)


def _predictor(model: Any) -> Any:
    if _is_classifier(model):
        predict = getattr(model, "predict_proba", None)
        if predict is None:
            raise not_convertible(
                type(model).__name__,
                given="a classifier without predict_proba",
                allowed="a classifier that gives probabilities",
                fix="fit CalibratedClassifierCV around it",
            )
        return predict
    if not _is_regressor(model):
        raise InvalidInput.at("model", given=type(model).__name__, allowed=ALLOWED)
    return model.predict


def _is_classifier(model: Any) -> bool:
    from sklearn.base import is_classifier

    return bool(is_classifier(model))


def _is_regressor(model: Any) -> bool:
    from sklearn.base import is_regressor

    return bool(is_regressor(model))


def _to_onnx(model: Any, width: int) -> Any:
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType
    from skl2onnx.common.exceptions import MissingShapeCalculator

    if "xgboost" in sys.modules:  # otherwise no XGBoost estimator can be in the pipeline
        _register_xgboost()
    options = {id(model): {"zipmap": False}} if _is_classifier(model) else None
    types = [(FEATURES, FloatTensorType([None, width]))]
    try:
        with warnings.catch_warnings(), _whole_numbers():
            warnings.simplefilter("ignore")
            return to_onnx(model, initial_types=types, target_opset=OPSETS, options=options)
    except MissingShapeCalculator as error:
        found = re.search(r"<class '([\w.]+)'>", str(error))
        raise not_convertible(
            f"estimator {found[1].rpartition('.')[2] if found else type(model).__name__}",
            given="an estimator without a converter in skl2onnx",
            allowed="the estimators of scikit-learn",
            fix="use one of those, or export this step alone",
        ) from error
    except Exception as error:  # converters may raise anything
        raise not_convertible(
            f"estimator {type(model).__name__}",
            given=shorten(f"{type(error).__name__}: {error}", limit=300),
            allowed="estimators on one numeric matrix that skl2onnx can convert",
            fix="choose columns by number instead of name, and encode text before the pipeline",
        ) from error


def _register_xgboost() -> None:
    """Register converters for XGBoost estimators in pipelines."""
    from onnxmltools.convert.xgboost.operator_converters.XGBoost import convert_xgboost
    from skl2onnx import update_registered_converter
    from skl2onnx.common import shape_calculator as shapes
    from xgboost import XGBClassifier, XGBRegressor

    classifier, regressor = (
        shapes.calculate_linear_classifier_output_shapes,
        shapes.calculate_linear_regressor_output_shapes,
    )
    options = {"nocl": [True, False], "zipmap": [True, False, "columns"]}
    update_registered_converter(
        XGBClassifier, "FalajXGBClassifier", classifier, convert_xgboost, options=options
    )
    update_registered_converter(XGBRegressor, "FalajXGBRegressor", regressor, convert_xgboost)


@contextlib.contextmanager
def _whole_numbers() -> Iterator[None]:
    """Work around skl2onnx 1.20, which passes booleans for boosted trees where ONNX accepts integers only."""
    from skl2onnx.common import _container

    with _patching:
        original = _container.make_node
        _container.make_node = lambda *given, **attributes: original(
            *given, **{name: _whole(value) for name, value in attributes.items()}
        )
        try:
            yield
        finally:
            _container.make_node = original


def _whole(value: Any) -> Any:
    if isinstance(value, list) and any(isinstance(item, bool | np.bool_) for item in value):
        return [int(item) for item in value]
    return value
