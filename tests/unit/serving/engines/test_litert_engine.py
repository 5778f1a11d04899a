"""LiteRT models in a worker: dynamic and fixed numbers of rows, several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.tensors import DYNAMIC
from falaj.serving.runtime.loading import open_model
from framework_models import litert_bytes, rows

FILE = ServedFile(model="m", version="1", format=FileFormat.LITERT)
WEIGHT = np.arange(8).reshape(2, 4).astype(np.float32)
BIAS = np.array([1, 2], np.float32)


@pytest.mark.parametrize("has_dynamic_rows", [True, False])
@pytest.mark.parametrize("size", [1, 8])
def test_any_number_of_rows_is_answered(has_dynamic_rows: bool, size: int) -> None:
    content = litert_bytes(WEIGHT, BIAS, rows=size, has_dynamic_rows=has_dynamic_rows)
    engine = open_model(FILE, content)
    try:
        assert engine.model.inputs[0].shape == (DYNAMIC, 4)
        assert [tensor.name for tensor in (*engine.model.inputs, *engine.model.outputs)] == ["x", "y"]
        with ThreadPoolExecutor(4) as pool:
            given = [rows(count, seed=count) for count in (1, 2, 8, 19, 300)] * 4
            answers = list(pool.map(lambda array: engine.run([array])[0], given))
        for array, answer in zip(given, answers, strict=True):
            np.testing.assert_allclose(answer, array @ WEIGHT.T + BIAS, rtol=1e-4, atol=1e-4)
    finally:
        engine.close()
