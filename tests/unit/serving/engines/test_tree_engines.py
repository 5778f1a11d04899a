"""XGBoost and LightGBM in a worker: the same answers as the framework, in the convention of the ONNX export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from falaj.optimization.runtime.export import export_onnx
from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import ServedFile
from falaj.serving.runtime.engine import ModelEngine
from falaj.serving.runtime.loading import open_model
from framework_models import lightgbm_booster, lightgbm_bytes, rows, xgboost_booster, xgboost_bytes

FILE = ServedFile(model="m", version="1", format=FileFormat.XGBOOST)
LIGHTGBM = FILE.model_copy(update={"format": FileFormat.LIGHTGBM})


@contextmanager
def opened(file: ServedFile, content: bytes) -> Iterator[ModelEngine]:
    engine = open_model(file, content)
    try:
        yield engine
    finally:
        engine.close()


def with_gaps(count: int) -> Any:
    given = rows(count, seed=3)
    given[::3, 1] = np.nan
    given[::5, 2] = np.nan
    return given


@pytest.mark.parametrize(
    ("objective", "classes", "output", "kind"),
    [
        ("binary:logistic", 2, "probability", "json"),
        ("multi:softprob", 3, "probabilities", "ubj"),
        ("multi:softmax", 3, "probabilities", "ubj"),
        ("reg:squarederror", 2, "prediction", "ubj"),
    ],
)
def test_xgboost_answers_as_its_export_to_onnx_does(
    tmp_path: Path, objective: str, classes: int, output: str, kind: str
) -> None:
    booster = xgboost_booster(objective, classes=classes)
    given = with_gaps(100)
    exported = FILE.model_copy(update={"format": FileFormat.ONNX})
    if objective != "multi:softmax":  # the export compares with predict(), which gives classes there
        export_onnx(booster, tmp_path / "m.onnx", sample=given)
    else:
        export_onnx(xgboost_booster("multi:softprob", classes=classes), tmp_path / "m.onnx", sample=given)

    with (
        opened(FILE, xgboost_bytes(booster, kind)) as native,
        opened(exported, (tmp_path / "m.onnx").read_bytes()) as converted,
    ):
        (answer,), (wanted,) = native.run([given]), converted.run([given])

        assert not native.in_process
        assert [tensor.name for tensor in native.model.outputs] == [output]
        assert native.model.outputs == converted.model.outputs
        assert native.model.inputs == converted.model.inputs
        np.testing.assert_allclose(answer, wanted, atol=1e-5)


def test_a_linear_booster_and_one_with_categories_answer_as_the_framework() -> None:
    import xgboost as xgb

    linear = xgboost_booster(booster="gblinear")
    given = rows(200)
    given[:, 3] = np.arange(200) % 5
    types = ["q", "q", "q", "c"]
    data = xgb.DMatrix(given, label=given[:, 0] > 0, feature_types=types, enable_categorical=True)
    categorical = xgb.train({"objective": "binary:logistic", "nthread": 1}, data, num_boost_round=4)

    with opened(FILE, xgboost_bytes(linear)) as engine:
        wanted = linear.predict(xgb.DMatrix(rows(50)))
        np.testing.assert_allclose(engine.run([rows(50)])[0][:, 0], wanted, atol=1e-6)
    with opened(FILE, xgboost_bytes(categorical)) as engine:
        np.testing.assert_allclose(engine.run([given])[0][:, 0], categorical.predict(data), atol=1e-6)


@pytest.mark.parametrize(
    ("objective", "classes", "output"),
    [("binary", 2, "probability"), ("multiclass", 3, "probabilities"), ("regression", 2, "prediction")],
)
def test_lightgbm_answers_as_the_framework(objective: str, classes: int, output: str) -> None:
    booster = lightgbm_booster(objective, classes=classes)
    given = with_gaps(100)

    with opened(LIGHTGBM, lightgbm_bytes(booster)) as engine:
        (answer,) = engine.run([given])

    assert [tensor.name for tensor in engine.model.outputs] == [output]
    assert answer.dtype == np.float32
    np.testing.assert_allclose(answer, booster.predict(given).reshape(100, -1), atol=1e-6)


def test_100_000_rows_in_one_request() -> None:
    booster = xgboost_booster()
    given = with_gaps(100_001)

    with opened(FILE, xgboost_bytes(booster)) as engine:
        (answer,) = engine.run([given])

    assert answer.shape == (100_001, 1)
    np.testing.assert_array_equal(answer[:, 0], booster.inplace_predict(given))
