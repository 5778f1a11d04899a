"""The result of a conversion to ONNX, and errors common to all converters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from falaj.errors import Fault, InvalidInput, shorten
from falaj.records.registry import TensorSpec

Array = npt.NDArray[Any]

FEATURES = "features"
"""The name of the input of an exported model."""
FEATURE_NAMES = "falaj.features"
"""Metadata key of an ONNX file for its column names, a JSON list."""
ALLOWED = (
    "a torch module or exported program, a scikit-learn classifier or regressor, an XGBoost or CatBoost model, "
    "an ONNX model"
)


@dataclass(frozen=True)
class ConvertedModel:
    """A model as ONNX, and the outputs of the original for the sample."""

    content: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    references: Sequence[Array]
    batch_fix: str | None = None


def framework_of(model: Any) -> str:
    """Return `torch`, `xgboost`, `catboost`, `sklearn` or `onnx` without importing any of them."""
    owners = [cls.__module__.partition(".")[0] for cls in type(model).__mro__]
    for kind in (
        "torch",
        "xgboost",
        "catboost",
        "sklearn",
        "onnx",
    ):  # XGBoost's are scikit-learn estimators too
        if kind in owners:
            return kind
    raise InvalidInput.at("model", given=type(model).__name__, allowed=ALLOWED)


def not_convertible(where: str, *, given: str, allowed: str, fix: str) -> InvalidInput:
    """Return the error for a model that cannot be converted to ONNX."""
    fault = Fault(where=where, given=given, allowed=allowed, fix=fix)
    return InvalidInput("the model cannot be exported to ONNX; nothing was written", faults=[fault])


def invalid_sample(error: Exception, *, given: str = "") -> InvalidInput:
    """Return the error for a sample that the model itself rejects."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    words = shorten(f"{given}{type(error).__name__}: {reason}", limit=300)
    fault = Fault(where="sample", given=words, allowed="rows that the model takes")
    return InvalidInput("the model fails on the sample; nothing was written", faults=[fault])
