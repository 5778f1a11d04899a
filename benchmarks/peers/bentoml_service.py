"""The peer BentoML: the same ONNX session as a service; `bentoml serve` finds it here, and the model in MODEL."""

from __future__ import annotations

import os
from typing import Any

import bentoml
import numpy as np
import onnxruntime as ort


@bentoml.service(workers=1)
class OnnxService:
    def __init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(os.environ["MODEL"], options, providers=["CPUExecutionProvider"])

    @bentoml.api(route="/v2/models/a/infer")
    def infer(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        tensor = inputs[0]
        rows = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
        (scores,) = self._session.run(None, {"x": rows})
        output = {"name": "y", "datatype": "FP32", "shape": scores.shape, "data": scores.ravel().tolist()}
        return {"model_name": "a", "model_version": "1", "outputs": [output]}
