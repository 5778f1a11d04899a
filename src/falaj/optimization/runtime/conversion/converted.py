"""What every converter gives, and which of them a model needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from falaj.errors import Fault, InvalidInput, shorten
from falaj.records.registry import TensorSpec

Array = npt.NDArray[Any]

FEATURES = "features"
"""What the input of an exported model is called."""
FEATURE_NAMES = "falaj.features"
"""Where an ONNX file keeps the names of its columns, as a JSON list."""
ALLOWED = "a torch module or exported program, a scikit-learn classifier or regressor, or an XGBoost model"


@dataclass(frozen=True)
class ConvertedModel:
    """A model as ONNX, and what the original gives for the sample, output by output."""

    content: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    references: Sequence[Array]
    batch_fix: str | None = None


def framework_of(model: Any) -> str:
    """`torch`, `xgboost` or `sklearn`, told without importing any of them."""
    owners = [cls.__module__.partition(".")[0] for cls in type(model).__mro__]
    for kind in ("torch", "xgboost", "sklearn"):  # XGBoost's estimators are scikit-learn's too
        if kind in owners:
            return kind
    raise InvalidInput.at("model", given=type(model).__name__, allowed=ALLOWED)


def not_convertible(where: str, *, given: str, allowed: str, fix: str) -> InvalidInput:
    """The error for a model that cannot become ONNX."""
    fault = Fault(where=where, given=given, allowed=allowed, fix=fix)
    return InvalidInput("the model does not export to ONNX; nothing was written", faults=[fault])


def invalid_sample(error: Exception, *, given: str = "") -> InvalidInput:
    """The error for a sample that the model itself does not take."""
    told = next(iter(str(error).strip().splitlines()), type(error).__name__)
    words = shorten(f"{given}{type(error).__name__}: {told}", limit=300)
    fault = Fault(where="sample", given=words, allowed="rows that the model takes")
    return InvalidInput("the model does not predict on the sample; nothing was written", faults=[fault])
