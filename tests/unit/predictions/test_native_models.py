"""Models of other formats than ONNX in batches: the process without keys opens them with their own framework."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from falaj.assembly.prediction.local_files import predict_files
from falaj.errors import InvalidInput
from falaj.records.control.predictions import PredictionColumns, PredictionRun
from falaj.records.registry import FileFormat, TensorSpec
from framework_models import lightgbm_booster, lightgbm_bytes, rows, xgboost_booster, xgboost_bytes

ROWS = 70_001


def predicted(folder: Path, content: bytes, kind: FileFormat, given: Any) -> Any:
    """Return what a batch prediction of `given` writes."""
    names = tuple(f"f{number}" for number in range(given.shape[1]))
    pq.write_table(
        pa.table({name: given[:, number] for number, name in enumerate(names)}), folder / "in.parquet"
    )
    run = PredictionRun(
        model="m@1",
        file="model.bin",
        sha256=hashlib.sha256(content).hexdigest(),
        format=kind,
        tensors=(TensorSpec(name="features", dtype="float32", shape=(-1, len(names)), features=names),),
        columns=PredictionColumns(keep=()),
        source=str(folder / "in.parquet"),
    )
    predict_files(run, [content], folder / "out.parquet", report=lambda _: None)
    table = pq.read_table(folder / "out.parquet")
    return table.column(0).to_numpy()


def test_xgboost_predicts_as_the_framework_does(tmp_path: Path) -> None:
    import xgboost as xgb

    booster, given = xgboost_booster("binary:logistic"), rows(ROWS, seed=1)

    found = predicted(tmp_path, xgboost_bytes(booster, "ubj"), FileFormat.XGBOOST, given)

    np.testing.assert_allclose(found, booster.predict(xgb.DMatrix(given)), atol=1e-6)


def test_lightgbm_predicts_as_the_framework_does(tmp_path: Path) -> None:
    booster, given = lightgbm_booster(), rows(ROWS, seed=1)

    found = predicted(tmp_path, lightgbm_bytes(booster), FileFormat.LIGHTGBM, given)

    np.testing.assert_allclose(found, booster.predict(given), atol=1e-6)


def test_a_truncated_booster_is_refused_in_a_sentence(tmp_path: Path) -> None:
    content = xgboost_bytes(xgboost_booster("binary:logistic"), "ubj")[:-200]

    with pytest.raises(InvalidInput, match="m@1 is not an XGBoost model that can be opened"):
        predicted(tmp_path, content, FileFormat.XGBOOST, rows(10))

    assert not (tmp_path / "out.parquet").exists()
