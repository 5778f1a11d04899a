"""The training of students: what is kept of them, what they are shown, and that a killed training resumes exactly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import nn

from falaj.assembly.distillation import __main__ as training
from falaj.assembly.distillation.__main__ import train_student
from falaj.errors import InvalidInput
from falaj.optimization.budgets import parse_budget
from falaj.optimization.progress import parse_progress
from falaj.optimization.runtime.candidates import onnx_candidate, open_original
from falaj.optimization.runtime.conversion.onnx_graphs import operators
from falaj.optimization.runtime.export import export_onnx
from falaj.optimization.runtime.judged_rows import read_fitting_rows, read_judged_rows
from falaj.optimization.runtime.recipes import distillation
from falaj.optimization.settings import OptimizationSettings
from falaj.records.optimization import StudentReport

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "optimization"))
import networks  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from conftest import Learnable  # type: ignore[attr-defined]

pytestmark = pytest.mark.slow

NAMES = tuple(f"f{number}" for number in range(8))


def settings(budget: str, **changed: Any) -> OptimizationSettings:
    given = {
        "target": "late",
        "features": NAMES,
        "recipes": ("onnx", "distill"),
        "budget": parse_budget(budget),
    }
    return OptimizationSettings.model_validate({**given, **changed})


class Trained:
    """The folders of a training job."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.inputs, self.outputs = folder, folder / "in", folder / "out"
        (self.inputs / "model").mkdir(parents=True)
        self.log: list[str] = []

    def train(self, chosen: OptimizationSettings, **more: Any) -> StudentReport:
        return train_student(chosen, inputs=self.inputs, outputs=self.outputs, log=self.log.append, **more)

    @property
    def student(self) -> bytes:
        return (self.outputs / "student.onnx").read_bytes()


@pytest.fixture
def trees(tmp_path: Path, boosted: Any, rows: Learnable) -> Trained:
    """The inputs of a job for boosted trees; the data has missing values."""
    job = Trained(tmp_path)
    (job.inputs / "model" / "model.json").write_bytes(bytes(boosted.get_booster().save_raw("json")))
    columns = {name: rows.holed[:, number] for number, name in enumerate(NAMES)}
    pq.write_table(pa.table({**columns, "late": rows.target}), job.inputs / "data.parquet")
    return job


def test_trees_are_distilled_into_a_network_that_takes_missing_values(
    trees: Trained, boosted: Any, rows: Learnable
) -> None:
    report = trees.train(settings("auc -0.2"))

    predicted = onnx_candidate("student", trees.student).predict(rows.holed)
    assert np.isfinite(predicted).all()
    assert "Gemm" in operators(onnx.load_from_string(trees.student))
    assert np.corrcoef(predicted.ravel(), boosted.predict_proba(rows.holed)[:, 1])[0, 1] > 0.5
    assert report.worse is not None
    assert report.worse <= 0.2
    assert json.loads((trees.outputs / "student.json").read_text())["width"] == report.width
    told = [found for line in trees.log if (found := parse_progress(line)) is not None]
    assert [each.stage for each in told][-2:] == ["training", "made"]


@pytest.mark.parametrize(
    ("network", "known"),
    [
        (lambda: networks.ImageClassifier((8, 16, 16), activation=nn.SiLU, excite=True), networks.image_rows),
        (lambda: networks.TransformerEncoder(32, 1), networks.token_rows),
    ],
    ids=["images", "tokens"],
)
def test_networks_are_distilled_by_the_kind_of_their_input(network: Any, known: Any, tmp_path: Path) -> None:
    job, data = Trained(tmp_path), known(400, seed=2)
    model = networks.train(network(), known(320, seed=1), epochs=4)
    networks.save_export(model, data, job.inputs / "model" / "model.pt2")
    flat = data.features.reshape(len(data.target), -1)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])
    pq.write_table(pa.table({"row": lists, "late": data.target}), job.inputs / "data.parquet")

    report = job.train(settings("accuracy -0.6", features=("row",)))

    assert report.refused == ""
    made = onnx_candidate("student", job.student).predict(data.features[:8])
    assert made.shape == open_original(job.inputs / "model").predict(data.features[:8]).shape
    whole = export_onnx(model, tmp_path / "whole.onnx", sample=data.features[:8]).path
    assert len(job.student) < 0.8 * whole.stat().st_size


def test_a_student_that_never_reaches_its_budget_is_no_student(
    trees: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "WIDTHS", (1, 2))
    monkeypatch.setattr(distillation, "EPOCHS", 1)

    report = trees.train(settings("accuracy -0"))

    assert "distillation: no student reaches the budget; the best one's accuracy is" in report.refused
    assert [each.name for each in trees.outputs.iterdir()] == ["student.json"]
    assert StudentReport.model_validate_json((trees.outputs / "student.json").read_text()) == report


def test_an_input_for_which_there_is_no_student_is_refused() -> None:
    with pytest.raises(distillation.RecipeNotApplicable, match="no student for inputs of float32"):
        distillation.make_student(
            np.zeros((4, 3, 5), np.float32), np.zeros((4, 1)), width=8, outputs="scores"
        )


# ------------------------------------------------------------------------------------------------------ rows


def as_rows(features: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in features}


def test_a_student_is_not_shown_the_rows_that_judge(trees: Trained) -> None:
    original, chosen = open_original(trees.inputs / "model"), settings("auc -0.2")

    fitting, _ = read_fitting_rows(chosen, original, trees.inputs)
    judged = read_judged_rows(chosen, original, trees.inputs)

    assert judged.fitting is not None
    assert as_rows(fitting.features) == as_rows(judged.fitting.features)
    assert not as_rows(fitting.features) & as_rows(judged.rows.features)


def test_with_a_held_out_set_a_student_learns_from_all_of_the_data_and_never_sees_that_set(
    trees: Trained,
) -> None:
    original = open_original(trees.inputs / "model")

    fitting, _ = read_fitting_rows(settings("auc -0.2", held_out=True), original, trees.inputs)

    assert len(fitting) == 1500  # the held-out set is not even there


def test_one_row_is_not_enough(trees: Trained) -> None:
    table = pq.read_table(trees.inputs / "data.parquet")
    pq.write_table(table.slice(0, 1), trees.inputs / "data.parquet")

    with pytest.raises(InvalidInput, match="rows to calibrate or train with"):
        trees.train(settings("accuracy -0.2"))
    report = trees.train(settings("accuracy -0.2", held_out=True))

    assert "one row to learn from" in report.refused


# ---------------------------------------------------------------------------------------------------- resumed

KILLED = """
import os, signal, sys
from pathlib import Path
from falaj.assembly.distillation import __main__ as distillation
from falaj.optimization.runtime.recipes.distillation import Distillation
from falaj.optimization.settings import parse_settings

distillation.CHECKPOINT_EVERY = 20
evaluate, seen = Distillation.evaluate, []

def die(self, model):
    seen.append(1)
    if len(seen) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(self, model)

Distillation.evaluate = die
folder = Path(sys.argv[1])
places = {"inputs": folder / "in", "outputs": folder / "out", "run": folder / "run"}
distillation.train_student(parse_settings(sys.argv[2:]), **places)
"""


def test_a_killed_training_resumes_and_makes_the_same_student(
    trees: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen = settings("auc -0.2")
    monkeypatch.setattr(training, "CHECKPOINT_EVERY", 20)
    trees.train(chosen, run=tmp_path / "undisturbed")
    undisturbed = trees.student
    (trees.outputs / "student.onnx").unlink()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), *chosen.arguments()],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (trees.outputs / "student.onnx").exists()
    trees.log.clear()

    trees.train(chosen, run=tmp_path / "run")

    assert weights(trees.student) == weights(undisturbed)
    told = [found for line in trees.log if (found := parse_progress(line)) is not None]
    assert len([each for each in told if each.stage == "training"]) < 10  # the first ones were not repeated


def weights(content: bytes) -> dict[str, bytes]:
    graph = onnx.load_from_string(content).graph
    return {each.name: onnx.numpy_helper.to_array(each).tobytes() for each in graph.initializer}
