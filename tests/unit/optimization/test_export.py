"""Models export to ONNX files with equal predictions, or fail with an error that names the cause."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
import pytest
import torch
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
)
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from torch import nn
from xgboost import XGBClassifier, XGBRegressor

import falaj as fj
from falaj.errors import InvalidInput, Unavailable
from falaj.records.registry import TensorSpec

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from conftest import Learnable  # type: ignore[attr-defined]

LETTERS = list("abcdefgh")


def run(path: Path, rows: Any) -> Any:
    (output,) = ort.InferenceSession(path).run(None, {"features": rows})
    return output


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "models" / "model.onnx"


def refusal(model: Any, path: Path, sample: Any, **options: Any) -> str:
    """Return the error of the refused export; nothing is left behind."""
    with pytest.raises(InvalidInput) as caught:
        fj.export_onnx(model, path, sample=sample, **options)
    assert not path.parent.exists()
    return str(caught.value)


# -------------------------------------------------------------------------------------------------- torch


@pytest.mark.slow
def test_a_network_is_exported_in_its_evaluation_mode(network: Any, rows: Learnable, path: Path) -> None:
    network.train()

    made = fj.export_onnx(network, path, sample=rows.features[:64], names=LETTERS)

    assert network.training
    assert all(module.training for module in network.modules())
    network.eval()
    with torch.no_grad():
        expected = network(torch.from_numpy(rows.features)).numpy()
    assert np.abs(run(path, rows.features) - expected).max() < 1e-5
    assert made.inputs == (
        TensorSpec(name="features", dtype="float32", shape=(-1, 8), features=tuple(LETTERS)),
    )
    assert made.outputs == (TensorSpec(name="output", dtype="float32", shape=(-1, 1)),)
    assert (made.rows, made.max_difference < 1e-5) == (64, True)


def test_one_row_suffices_as_sample(rows: Learnable, path: Path) -> None:
    fj.export_onnx(nn.Linear(8, 2), path, sample=torch.from_numpy(rows.features[:1]))

    assert run(path, rows.features[:9]).shape == (9, 2)


def test_an_exported_program_is_exported_again(rows: Learnable, path: Path) -> None:
    sample = torch.from_numpy(rows.features[:16])
    any_rows = ({0: torch.export.Dim("rows")},)

    fj.export_onnx(
        torch.export.export(nn.Linear(8, 2), (sample,), dynamic_shapes=any_rows), path, sample=sample
    )

    assert run(path, rows.features[:5]).shape == (5, 2)


def test_a_program_for_a_fixed_number_of_rows_is_refused(rows: Learnable, path: Path) -> None:
    sample = torch.from_numpy(rows.features[:16])

    message = refusal(torch.export.export(nn.Linear(8, 2), (sample,)), path, sample)

    assert "any number of rows" in message
    assert "dynamic_shapes" in message


class Eigenvalues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.linalg.eigvals(x.T @ x).real.sum()


def test_an_operator_that_onnx_lacks_is_named_with_its_layer(rows: Learnable, path: Path) -> None:
    message = refusal(nn.Sequential(nn.Linear(8, 8), Eigenvalues()), path, rows.features[:16])

    assert "the operator aten.linalg_eig" in message
    assert "layer 1 (Eigenvalues): return x + torch.linalg.eigvals" in message


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_branch_on_values_is_shown_with_its_line(rows: Learnable, path: Path) -> None:
    message = refusal(Branch(), path, rows.features[:16])

    assert "test_export.py" in message
    assert "if x.sum() > 0" in message
    assert "torch.where" in message


# ----------------------------------------------------------------------------------------------- scikit-learn


def test_a_pipeline_gives_the_probability_of_the_second_class(rows: Learnable, path: Path) -> None:
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows.features, rows.target)

    made = fj.export_onnx(model, path, sample=rows.features, names=LETTERS)

    assert np.abs(run(path, rows.features) - model.predict_proba(rows.features)[:, 1:]).max() < 1e-5
    assert made.outputs == (TensorSpec(name="probability", dtype="float32", shape=(-1, 1)),)


def test_columns_are_named_after_the_frame_that_a_model_was_trained_on(rows: Learnable, path: Path) -> None:
    frame = pd.DataFrame(rows.features, columns=LETTERS)
    model = LogisticRegression().fit(frame, rows.target)

    made = fj.export_onnx(model, path, sample=rows.features[:50])

    assert made.inputs[0].features == tuple(LETTERS)
    meta = ort.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert json.loads(meta["falaj.features"]) == LETTERS


def test_boosted_trees_agree_on_missing_values(rows: Learnable, path: Path) -> None:
    model = HistGradientBoostingClassifier(max_iter=20).fit(rows.holed, rows.target)

    fj.export_onnx(model, path, sample=rows.holed[:500])

    assert np.abs(run(path, rows.holed)[:, 0] - model.predict_proba(rows.holed)[:, 1]).max() < 1e-5


def test_a_regressor_gives_one_column(rows: Learnable, path: Path) -> None:
    model = HistGradientBoostingRegressor(max_iter=20).fit(rows.holed, rows.features[:, 0])

    made = fj.export_onnx(model, path, sample=rows.holed[:500])

    assert made.outputs == (TensorSpec(name="prediction", dtype="float32", shape=(-1, 1)),)


def test_more_classes_have_a_column_each(rows: Learnable, path: Path) -> None:
    three = np.arange(len(rows.target)) % 3
    model = RandomForestClassifier(10, max_depth=4, random_state=0).fit(rows.features, three)

    made = fj.export_onnx(model, path, sample=rows.features[:100])

    assert made.outputs == (TensorSpec(name="probabilities", dtype="float32", shape=(-1, 3)),)


def test_a_classifier_without_probabilities_is_refused(rows: Learnable, path: Path) -> None:
    message = refusal(LinearSVC().fit(rows.features, rows.target), path, rows.features)

    assert "CalibratedClassifierCV" in message


def test_an_estimator_without_a_converter_is_named(rows: Learnable, path: Path) -> None:
    class Own(LinearRegression):
        pass

    message = refusal(Own().fit(rows.features, rows.target), path, rows.features)

    assert "estimator Own" in message


# --------------------------------------------------------------------------------------------------- XGBoost


@pytest.mark.parametrize(
    "inner", [lambda model: model, lambda model: model.get_booster()], ids=["estimator", "booster"]
)
def test_trees_of_xgboost_agree_on_missing_values(
    boosted: Any, inner: Any, rows: Learnable, path: Path
) -> None:
    made = fj.export_onnx(inner(boosted), path, sample=rows.holed[:500])

    assert np.isnan(rows.holed[:500]).any()
    assert np.abs(run(path, rows.holed)[:, 0] - boosted.predict_proba(rows.holed)[:, 1]).max() < 1e-5
    assert made.outputs == (TensorSpec(name="probability", dtype="float32", shape=(-1, 1)),)


def test_a_base_score_far_from_zero_is_kept(rows: Learnable, path: Path) -> None:
    model = XGBRegressor(n_estimators=10, n_jobs=1).fit(rows.holed, rows.features[:, 0] + 1000)

    fj.export_onnx(model, path, sample=rows.holed[:500])

    assert np.abs(run(path, rows.holed)[:, 0] - model.predict(rows.holed)).max() < 1e-2


def test_trees_with_named_columns_keep_the_names(rows: Learnable, path: Path) -> None:
    frame = pd.DataFrame(rows.holed, columns=LETTERS)
    model = XGBClassifier(n_estimators=5, n_jobs=1).fit(frame, rows.target)

    made = fj.export_onnx(model, path, sample=frame[:100])

    assert made.inputs[0].features == tuple(LETTERS)


def test_trees_after_the_best_iteration_are_left_out(rows: Learnable, path: Path) -> None:
    model = XGBClassifier(n_estimators=200, early_stopping_rounds=3, n_jobs=1)
    model.fit(
        rows.holed[:900], rows.target[:900], eval_set=[(rows.holed[900:], rows.target[900:])], verbose=False
    )
    assert model.best_iteration + 1 < model.get_booster().num_boosted_rounds()

    made = fj.export_onnx(model, path, sample=rows.holed[:500])

    assert made.max_difference < 1e-5


def test_splits_on_categories_are_refused(rows: Learnable, path: Path) -> None:
    frame = pd.DataFrame(rows.features, columns=LETTERS)
    frame["h"] = pd.Categorical(np.arange(len(frame)) % 4)
    model = XGBClassifier(n_estimators=3, enable_categorical=True, n_jobs=1).fit(frame, rows.target)

    assert "splits on categories" in refusal(model, path, frame.astype(float))


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (np.zeros((4, 3), np.float32), "X has 3 features, but LinearRegression is expecting 8"),
        (np.zeros((0, 8), np.float32), "at least one row"),
        (np.zeros(8, np.float32), "[rows, features]"),
        ([["a"] * 8], "encode text"),
        ((np.zeros((4, 8)), np.zeros((4, 8))), "one array of rows"),
    ],
    ids=["width", "empty", "flat", "text", "two"],
)
def test_a_mismatched_sample_is_refused(sample: Any, words: str, rows: Learnable, path: Path) -> None:
    model = LinearRegression().fit(rows.features, rows.target)

    assert words in refusal(model, path, sample)


def test_names_must_fit_the_columns(rows: Learnable, path: Path) -> None:
    model = LinearRegression().fit(rows.features, rows.target)

    assert "3 names" in refusal(model, path, rows.features, names=["a", "b", "c"])
    assert "7 of them unique" in refusal(model, path, rows.features, names=[*"abcdefg", "a"])


def test_an_object_that_is_not_a_model_is_refused(rows: Learnable, path: Path) -> None:
    assert "given    dict" in refusal({}, path, rows.features)


def test_a_package_that_is_missing_is_named(
    boosted: Any, rows: Learnable, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxmltools.convert", None)

    with pytest.raises(Unavailable, match=r"needs the package onnxmltools: pip install 'falaj\[trees\]'"):
        fj.export_onnx(boosted, path, sample=rows.holed[:50])


def test_an_export_with_different_predictions_is_not_written(rows: Learnable, path: Path) -> None:
    """Rounding moves some rows across a threshold: the trees see scaled columns."""
    model = make_pipeline(StandardScaler(), XGBClassifier(n_estimators=30, n_jobs=1))
    model.fit(rows.features, rows.target)

    message = refusal(model, path, rows.features, tolerance=1e-12)

    assert "predicts differently from the model" in message
    assert "output probability at" in message


# --------------------------------------------------------------------------------------------------- onnx


def onnx_model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')


DOUBLED = "doubled (float[N, 8] features) => (float[N, 8] sum) { sum = Add(features, features) }"


def test_a_model_that_is_onnx_keeps_its_names(rows: Learnable, path: Path) -> None:
    made = fj.export_onnx(onnx_model(DOUBLED), path, sample=rows.features[:20], names=LETTERS)

    assert np.array_equal(run(path, rows.features), 2 * rows.features)
    assert made.inputs == (
        TensorSpec(name="features", dtype="float32", shape=(-1, 8), features=tuple(LETTERS)),
    )
    assert made.outputs == (TensorSpec(name="sum", dtype="float32", shape=(-1, 8)),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DOUBLED.replace("N, 8", "20, 8"), "by a name, like N"),  # takes 20 rows, and no other number
        ("m (float[N, 8] a, float[N, 8] b) => (float[N, 8] c) { c = Add(a, b) }", "2 inputs: a, b"),
        (DOUBLED.replace("N, 8", "N, 3"), "the model fails on the sample"),
    ],
)
def test_a_model_that_is_onnx_and_cannot_be_served_is_refused(
    text: str, words: str, rows: Learnable, path: Path
) -> None:
    assert words in refusal(onnx_model(text), path, rows.features[:20])


# --------------------------------------------------------------------------------------- the model of a job


def test_a_job_leaves_its_model_with_a_description(
    boosted: Any, rows: Learnable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_OUTPUTS", str(tmp_path / "out"))

    fj.save_model(boosted, sample=rows.holed[:50], names=LETTERS, metrics={"auc": 0.9}, card="# Late")

    description = json.loads((tmp_path / "out" / "model.json").read_text())
    assert (description["files"], description["metrics"], description["card"]) == (
        ["model/model.onnx"],
        {"auc": 0.9},
        "# Late",
    )
    assert TensorSpec.model_validate(description["inputs"][0]).features == tuple(LETTERS)
    assert run(tmp_path / "out" / "model" / "model.onnx", rows.holed[:3]).shape == (3, 1)
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["model", "model.json"]


def test_outside_a_job_the_model_is_written_below_outputs(
    boosted: Any, rows: Learnable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FALAJ_OUTPUTS", raising=False)
    monkeypatch.chdir(tmp_path)

    fj.save_model(boosted, sample=rows.holed[:50])

    assert (tmp_path / "outputs" / "model.json").exists()


def test_a_metric_that_is_not_a_number_is_refused_before_anything_is_written(
    boosted: Any, rows: Learnable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_OUTPUTS", str(tmp_path / "out"))

    with pytest.raises(InvalidInput, match=r"metrics\.loss"):
        fj.save_model(boosted, sample=rows.holed[:50], metrics={"loss": float("nan")})

    assert not (tmp_path / "out").exists()
