"""The tensors of tree models, named and shaped as in their export to ONNX."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from falaj.records.serving.tensors import DYNAMIC, Datatype, Tensor

Array = npt.NDArray[Any]

FEATURES = "features"
"""The one input: a row of numbers."""

OutputKind = Literal["probability", "probabilities", "prediction"]
"""Of the second of two classes, of each of several classes, or a number."""


def output_tensor(kind: OutputKind, width: int) -> Tensor:
    return Tensor(name=kind, datatype=Datatype.FP32, shape=(DYNAMIC, width))


def softmax(margins: Array) -> Array:
    powers = np.exp(margins - margins.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)
