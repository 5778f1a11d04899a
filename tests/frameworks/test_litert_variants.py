"""The recipe litert with its real converter: a torch export becomes a LiteRT variant that is judged and served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import falaj as fj
from falaj.errors import InvalidInput
from falaj.optimization import hardware
from falaj.records.control.workflows import WorkflowState
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.optimization import AcceptanceBudget, Optimization, OptimizationVerdict
from falaj.records.registry import FileFormat, TensorSpec
from falaj.records.serving.endpoints import ServedFile
from falaj.serving.runtime.loading import open_model
from framework_testbed import FrameworkTestbed
from virtualenvs import ROOT, environment

sys.path.insert(0, str(ROOT / "examples" / "optimization"))
import networks

NAMES = tuple(f"f{number}" for number in range(32))
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)

RECIPE = """
import json, sys
from pathlib import Path
import numpy as np, torch
from torch import nn
sys.path.insert(0, sys.argv[1])
import networks
from falaj.optimization.runtime import quality
from falaj.optimization.runtime.candidates import litert_candidate, open_candidate
from falaj.optimization.runtime.evaluation_data import EvaluationRows
from falaj.optimization.runtime.memory import measure_memory
from falaj.optimization.runtime.recipes import litert
from falaj.optimization.runtime.recipes.recipe_input import RecipeInput, RecipeNotApplicable
from falaj.records.optimization import AcceptanceBudget

folder = Path(sys.argv[2])

def given(network, rows, name):
    networks.save_export(network.eval(), rows, folder / f"{name}.pt2")
    original = open_candidate("original", folder / f"{name}.pt2")
    target = rows.target.astype(float)
    predicted = quality.predict_all(original.predict, rows.features)
    judge = quality.choose_evaluator(target, predicted)
    fitting = EvaluationRows(rows.features, target)
    return RecipeInput(original, rows.features[:64], fitting, judge, (), AcceptanceBudget(), (), log=print)

found = {}
for name, network, rows in (
    ("mlp", networks.Mlp(64), networks.tabular_rows),
    ("mobilenet", networks.ImageClassifier((8, 16), activation=nn.ReLU6, excite=False), networks.image_rows),
    ("efficientnet", networks.ImageClassifier((8, 16), activation=nn.SiLU, excite=True), networks.image_rows),
    ("transformer", networks.TransformerEncoder(32, 1), networks.token_rows),
):
    made = litert.convert_to_litert(asked := given(network, rows(100, seed=1), name))
    (folder / f"{name}.tflite").write_bytes(made.content)
    opened = litert_candidate(name, made.content)
    gap = max(
        float(np.abs(opened.predict(asked.rows.features[:n]) - asked.original.predict(asked.rows.features[:n])).max())
        for n in (1, 5, 100)
    )
    memory = measure_memory(folder / f"{name}.tflite", asked.sample)
    found[name] = [gap, opened.inputs[0].dtype, opened.inputs[0].shape, memory]

class Unusual(nn.Module):
    def forward(self, rows):
        return torch.sigmoid(torch.special.bessel_j0(rows).sum(dim=1, keepdim=True))

def refused(asked):
    try:
        litert.convert_to_litert(asked)
    except RecipeNotApplicable as error:
        return str(error)

found["no operator"] = refused(given(Unusual(), networks.tabular_rows(100), "unusual"))
asked = given(networks.Mlp(64), networks.tabular_rows(100), "other")
real = litert._convert
litert._convert = lambda given: (folder / "mlp.tflite").read_bytes()
found["other weights"] = refused(asked)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Convert small networks of every type; return the folder of the files, and what was found."""
    folder = tmp_path_factory.mktemp("litert")
    done = subprocess.run(
        [environment("litert") / "bin" / "python", "-c", RECIPE, ROOT / "examples" / "optimization", folder],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "dtype", "row"),
    [
        ("mlp", "float32", [32]),
        ("mobilenet", "float32", [3, 32, 32]),
        ("efficientnet", "float32", [3, 32, 32]),
        ("transformer", "int64", [32]),
    ],
)
def test_every_network_becomes_a_model_that_answers_any_number_of_rows_alike(
    name: str, dtype: str, row: list[int], converted: tuple[Path, dict[str, Any]]
) -> None:
    folder, found = converted
    content = (folder / f"{name}.tflite").read_bytes()
    served = open_model(ServedFile(model="m", version="1", format=FileFormat.LITERT), content)
    rows = np.ones((5, *row), dtype)

    try:
        (together,) = served.run([rows])
        (alone,) = served.run([rows[:1]])
    finally:
        served.close()

    difference, type_, shape, memory = found[name]
    assert difference < 1e-4
    assert (type_, shape) == (dtype, [-1, *row])
    assert memory > 0
    assert len(together) == 5
    np.testing.assert_allclose(together, np.repeat(alone, 5, axis=0), rtol=1e-5, atol=1e-6)


def test_a_network_that_does_not_convert_or_answers_differently_is_refused(
    converted: tuple[Path, dict[str, Any]],
) -> None:
    _, found = converted

    assert "the conversion to LiteRT failed" in found["no operator"]
    assert "bessel_j0" in found["no operator"]
    assert "the LiteRT model cannot be used" in found["other weights"]
    assert "predicts differently from the model" in found["other weights"]


@pytest.mark.parametrize("spoil", [lambda c: c[: len(c) // 2], lambda c: c[:8] + b"\xff" * 64 + c[72:]])
def test_a_corrupt_litert_file_is_not_opened(
    spoil: Callable[[bytes], bytes], converted: tuple[Path, dict[str, Any]]
) -> None:
    folder, _ = converted
    content = spoil((folder / "mlp.tflite").read_bytes())

    with pytest.raises(InvalidInput, match="m@1 "):
        open_model(ServedFile(model="m", version="1", format=FileFormat.LITERT), content)


# ---------------------------------------------------------------------------------------------- on the platform


def register(platform: fj.Platform, folder: Path) -> np.ndarray:
    """Register a network as a torch export with its training set; return its rows."""
    rows = networks.tabular_rows(1200, seed=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    networks.save_export(networks.train(networks.Mlp(64), rows, epochs=3), rows, folder / "model.pt2")
    platform.features.apply(
        entities=(Entity(name="origin", key="origin"),),
        views=(
            FeatureView(
                name="origins", entities=("origin",), columns=(Feature(name="wind", type=ColumnType.FLOAT),)
            ),
        ),
    )
    platform.ingest("origins", pa.table({"origin": ["a"], "event_time": [NOON], "wind": [1.0]}))
    columns = {name: rows.features[:, place] for place, name in enumerate(NAMES)}
    spine = {"origin": ["a"] * 1200, "event_time": [NOON] * 1200, **columns, "late": rows.target}
    data = platform.training_set("june", spine=pa.table(spine), views=("origins",))
    blob = platform.put("model", (folder / "model.pt2").read_bytes())
    entry = TensorSpec(name="rows", dtype="float32", shape=(-1, 32), features=NAMES)
    platform.models.register(
        "late", files=(blob.id,), paths=("model.pt2",), inputs=(entry,), training_set=data.id
    )
    return rows.features


def optimized(platform: fj.Platform, **options: Any) -> Optimization:
    budget = AcceptanceBudget(metric="auc", worse=0.01, relative=False)
    work = platform.optimization.start("late@1", recipes=("litert",), target="late", budget=budget, **options)
    *_, ended = platform.workflows.watch(work.id)
    assert (ended.state, ended.error) == (WorkflowState.DONE, None)
    return platform.optimization.show((ended.result or {})["id"])


def test_a_litert_variant_is_measured_judged_registered_and_served(
    make_testbed: Callable[..., FrameworkTestbed], tmp_path: Path
) -> None:
    platform = make_testbed("litert").platform
    rows = register(platform, tmp_path)

    kept = optimized(platform, environment="litert")

    (variant,) = kept.report.variants
    assert variant.measured is not None, variant.reason
    assert variant.measured.memory_bytes
    assert variant.worse is not None
    assert variant.worse.high < 0.001
    assert kept.report.instruction_set == hardware.instruction_set()
    # A call of a torch export costs more than ten times as much as one of the interpreter.
    assert (variant.verdict, variant.version) == (OptimizationVerdict.ACCEPTED, "late@2"), variant.reason
    version = platform.models.version("late@2")
    assert version.format is FileFormat.LITERT
    assert version.inputs[0].features == NAMES
    (file,) = version.files
    content = b"".join(platform.models.read("late@2", file.path))
    served = open_model(ServedFile(model="late", version="2", format=FileFormat.LITERT), content)
    try:
        (answer,) = served.run([rows[:7]])
    finally:
        served.close()
    program = torch.export.load(str(tmp_path / "model.pt2")).module()
    wanted = program(torch.from_numpy(rows[:7])).detach().numpy()
    np.testing.assert_allclose(answer, wanted, rtol=1e-4, atol=1e-5)


def test_without_the_converter_the_variant_is_refused_and_says_what_to_do(
    make_testbed: Callable[..., FrameworkTestbed], tmp_path: Path
) -> None:
    platform = make_testbed().platform
    register(platform, tmp_path)

    (variant,) = optimized(platform).report.variants

    assert variant.verdict is OptimizationVerdict.REFUSED
    assert "not installed: litert_torch" in variant.reason
    assert "--environment" in variant.reason
