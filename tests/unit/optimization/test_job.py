"""The optimization job: make, measure and evaluate variants, and report failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from falaj.errors import InvalidInput
from falaj.optimization import hardware
from falaj.optimization.budgets import parse_budget
from falaj.optimization.progress import parse_progress
from falaj.optimization.runtime import job as optimization_job
from falaj.optimization.runtime import latency
from falaj.optimization.runtime.evaluation_data import EvaluationRows, split_rows
from falaj.optimization.runtime.export import export_onnx
from falaj.optimization.runtime.job import optimize
from falaj.optimization.runtime.memory import measure_memory
from falaj.optimization.settings import OptimizationSettings, parse_settings
from falaj.records.optimization import AcceptanceBudget, OptimizationReport, OptimizationVerdict
from processes import hide_module

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from conftest import Learnable  # type: ignore[attr-defined]

NAMES = tuple(f"f{number}" for number in range(8))
SETTINGS = OptimizationSettings(target="late", features=NAMES, recipes=("onnx", "int8", "fp16"))


class Job:
    """The folders of a job, with its data."""

    def __init__(self, folder: Path, rows: Learnable) -> None:
        self.inputs, self.outputs = folder / "in", folder / "out"
        (self.inputs / "model").mkdir(parents=True)
        table = {name: rows.holed[:, number] for number, name in enumerate(NAMES)}
        words = {"carrier": ["EK"] * len(rows.target)}
        pq.write_table(pa.table({**table, **words, "late": rows.target}), self.inputs / "data.parquet")

    def model(self, name: str, content: bytes) -> None:
        (self.inputs / "model" / name).write_bytes(content)

    def run(self, settings: OptimizationSettings = SETTINGS) -> OptimizationReport:
        return optimize(settings, inputs=self.inputs, outputs=self.outputs, log=lambda _: None)


@pytest.fixture
def job(tmp_path: Path, rows: Learnable, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(latency, "BLOCK_S", 0.001)
    monkeypatch.setattr(latency, "SEARCH_S", 0.002)
    monkeypatch.setattr(optimization_job, "measure_memory", lambda path, batch: 1 << 20)
    return Job(tmp_path, rows)


@pytest.fixture
def full_job(job: Job, rows: Learnable) -> Job:
    """The same without missing values."""
    table = {name: rows.features[:, number] for number, name in enumerate(NAMES)}
    pq.write_table(pa.table({**table, "late": rows.target}), job.inputs / "data.parquet")
    return job


def test_trees_are_exported_and_have_nothing_to_quantize(job: Job, boosted: Any, rows: Learnable) -> None:
    job.model("model.json", bytes(boosted.get_booster().save_raw("json")))

    report = job.run()

    onnx, int8, fp16 = report.variants
    assert (report.metric, report.rows, report.skipped_rows) == ("log_loss", 1500, 0)
    assert (
        onnx.verdict is OptimizationVerdict.ACCEPTED
    )  # a call of XGBoost costs ten times as much as one of ONNX Runtime
    assert onnx.speedup["a single row"].low > 2
    assert onnx.inputs[0].features == NAMES
    assert (int8.verdict, fp16.verdict) == (OptimizationVerdict.REFUSED, OptimizationVerdict.REFUSED)
    assert "nothing to quantize" in int8.reason
    assert "CPU" in fp16.reason
    (made,) = ort.InferenceSession(job.outputs / str(onnx.file)).run(None, {"features": rows.holed})
    assert np.abs(made[:, 0] - boosted.predict_proba(rows.holed)[:, 1]).max() < 1e-5
    assert OptimizationReport.model_validate_json((job.outputs / "report.json").read_text()) == report


def test_a_network_in_int8_is_judged_by_measurement(full_job: Job, network_file: Path) -> None:
    full_job.model("model.onnx", network_file.read_bytes())

    report = full_job.run(
        OptimizationSettings(target="late", recipes=("int8",), budget=AcceptanceBudget(worse=0.05))
    )

    (int8,) = report.variants
    assert int8.measured is not None
    assert int8.worse is not None
    assert int8.measured.size_bytes < report.original.size_bytes / 2
    within = int8.worse.high <= 0.05
    noise = {name: max(1.0, each.high, 1 / each.low) for name, each in report.noise.items()}
    faster = any(each.low >= max(1.1, noise[name]) for name, each in int8.speedup.items())
    served = (latency.SINGLE, latency.SERVED)
    slower = any(int8.speedup[name].high < 1 / noise[name] for name in served)
    assert (int8.verdict is OptimizationVerdict.ACCEPTED) == (within and faster and not slower)
    assert int8.measured.best_batch > 1
    assert report.instruction_set == hardware.instruction_set()
    assert report.original.auc == pytest.approx(int8.measured.auc, abs=0.02)


def test_the_graph_of_an_onnx_model_gains_nothing_by_being_fused_twice(
    full_job: Job, network_file: Path
) -> None:
    full_job.model("model.onnx", network_file.read_bytes())

    (onnx,) = full_job.run(
        OptimizationSettings(target="late", recipes=("onnx",), budget=AcceptanceBudget(speedup=2))
    ).variants

    assert onnx.verdict is OptimizationVerdict.REFUSED
    assert "not 2 times as fast" in onnx.reason


@pytest.mark.slow
def test_a_torch_export_is_measured_against_its_onnx(full_job: Job, network: Any, rows: Learnable) -> None:
    sample = torch.from_numpy(rows.features[:16])
    program = torch.export.export(network.eval(), (sample,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    program._example_inputs = None  # otherwise they are pickled, and the registry refuses the file
    torch.export.save(program, full_job.inputs / "model" / "model.pt2")

    (onnx,) = full_job.run(OptimizationSettings(target="late", features=NAMES, recipes=("onnx",))).variants

    assert onnx.worse is not None
    assert onnx.worse.high < 1e-4
    assert onnx.outputs[0].name == "output"


def test_rows_without_a_target_or_a_prediction_are_counted(
    job: Job, network_file: Path, rows: Learnable
) -> None:
    table = pq.read_table(job.inputs / "data.parquet")
    target = pa.array([None if number < 100 else value for number, value in enumerate(rows.target.tolist())])
    place = table.column_names.index("late")
    pq.write_table(table.set_column(place, "late", target), job.inputs / "data.parquet")
    job.model("model.onnx", network_file.read_bytes())

    report = job.run(OptimizationSettings(target="late", recipes=("fp16",)))

    whole = int((~np.isnan(rows.holed[100:]).any(axis=1)).sum())  # a network makes NaN of NaN
    assert (report.rows, report.skipped_rows) == (whole, 1500 - whole)


@pytest.mark.parametrize(
    ("target", "features", "words"),
    [
        ("delay", NAMES, "column delay"),
        ("late", (*NAMES[:7], "speed"), "column speed"),
        ("late", (*NAMES[:7], "carrier"), "string"),
        ("late", NAMES[:7], "7 columns"),
    ],
    ids=["no target", "no feature", "text", "too few"],
)
def test_columns_that_do_not_fit_are_refused(
    target: str, features: tuple[str, ...], words: str, job: Job, network_file: Path
) -> None:
    job.model("model.onnx", network_file.read_bytes())

    with pytest.raises(InvalidInput) as caught:
        job.run(OptimizationSettings(target=target, features=features))

    assert words in str(caught.value)
    assert not job.outputs.exists()


@pytest.mark.parametrize(
    ("name", "content"), [("notes.txt", b"hello"), ("model.onnx", b"hello"), ("m.json", b'{"learner": 1}')]
)
def test_an_object_that_is_not_a_model_is_refused(name: str, content: bytes, job: Job) -> None:
    job.model(name, content)

    with pytest.raises(InvalidInput, match="model"):
        job.run()


def test_settings_are_passed_as_arguments() -> None:
    assert parse_settings(SETTINGS.arguments()) == SETTINGS
    assert all(len(each) < 4096 for each in SETTINGS.arguments())
    with pytest.raises(InvalidInput, match="usage"):
        parse_settings(["{}"])


# --------------------------------------------------------------------------------------------- as a job


def launch(job: Job, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment |= {"FALAJ_INPUTS": str(job.inputs), "FALAJ_OUTPUTS": str(job.outputs)}
    command = [sys.executable, "-m", "falaj.optimization.runtime", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_the_program_runs_under_the_contract_of_jobs(job: Job, boosted: Any, rows: Learnable) -> None:
    export_onnx(boosted, job.inputs / "model" / "model.onnx", sample=rows.holed[:50])

    ran = launch(job, *SETTINGS.arguments())

    assert (ran.returncode, ran.stderr) == (0, "")
    assert "evaluating log_loss on 1500 rows" in ran.stdout
    told = [found for line in ran.stdout.splitlines() if (found := parse_progress(line)) is not None]
    assert [(each.name, each.stage) for each in told if "trees only compare" in each.reason] == [
        ("int8", "refused")
    ]
    report = json.loads((job.outputs / "report.json").read_text())
    assert [each["recipe"] for each in report["variants"]] == ["onnx", "int8", "fp16"]
    assert (job.outputs / "variants" / "onnx" / "model.onnx").exists()


def test_trees_are_optimized_without_torch(job: Job, boosted: Any, rows: Learnable, tmp_path: Path) -> None:
    export_onnx(boosted, job.inputs / "model" / "model.onnx", sample=rows.holed[:50])
    recipes = ("int8", "prune-structured", "prune-unstructured")
    settings = SETTINGS.model_copy(update={"recipes": recipes, "budget": AcceptanceBudget(worse=0.5)})

    ran = launch(job, *settings.arguments(), **hide_module("torch", tmp_path / "hidden"))

    assert (ran.returncode, ran.stderr) == (0, "")
    reasons = {
        each["recipe"]: each["reason"]
        for each in json.loads((job.outputs / "report.json").read_text())["variants"]
    }
    assert (job.outputs / "variants" / "prune-structured" / "model.onnx").exists()
    assert "needs the torch export" in reasons["prune-unstructured"]


def test_a_fault_is_reported_with_a_message(job: Job) -> None:
    ran = launch(job, *SETTINGS.arguments())

    assert ran.returncode == 1
    assert ran.stderr.startswith("error[input.invalid] model is not valid")
    assert "Traceback" not in ran.stderr


# ------------------------------------------------------------------------------------------ tensors and rows


def write_lists(path: Path, features: np.ndarray, target: np.ndarray) -> None:
    flat = features.reshape(len(features), int(np.prod(features.shape[1:])))
    lists = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])
    pq.write_table(pa.table({"pixels": lists, "late": target}), path)


@pytest.fixture
def image_job(job: Job) -> Job:
    """A job with a small image network, and its images as lists."""
    random = np.random.default_rng(5)
    images = random.normal(size=(300, 3, 8, 8)).astype(np.float32)
    target = (images[:, 0].mean(axis=(1, 2)) > 0).astype(np.int64)
    torch.manual_seed(2)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 2),
    )
    export_onnx(network, job.inputs / "model" / "model.onnx", sample=images[:8])
    write_lists(job.inputs / "data.parquet", images, target)
    return job


IMAGES = OptimizationSettings(
    target="late", features=("pixels",), recipes=("int8-static",), budget=parse_budget("accuracy -0.5")
)


def test_an_image_is_a_list_of_numbers_in_the_shape_of_the_input(image_job: Job) -> None:
    report = image_job.run(IMAGES)

    (static,) = report.variants
    assert (report.metric, report.rows, report.fitted_rows) == ("accuracy", 150, 150)
    assert static.inputs[0].shape == (-1, 3, 8, 8)
    assert static.measured is not None
    assert static.measured.accuracy == pytest.approx(report.original.accuracy or 0, abs=0.1)


def test_a_held_out_set_judges_and_the_data_teaches(image_job: Job) -> None:
    rows = pq.read_table(image_job.inputs / "data.parquet")
    pq.write_table(rows.slice(0, 80), image_job.inputs / "held_out.parquet")

    report = image_job.run(IMAGES.model_copy(update={"held_out": True}))

    assert (report.rows, report.fitted_rows) == (80, 300)
    assert report.held_out is not None
    assert (report.held_out.part, report.held_out.rows, report.held_out.total) == ("held-out set", 80, 80)


def test_the_rows_that_judge_are_identified_by_their_digest(image_job: Job) -> None:
    plain = IMAGES.model_copy(update={"recipes": ("onnx",)})
    split, again, whole = (image_job.run(each).held_out for each in (IMAGES, IMAGES, plain))
    rows = pq.read_table(image_job.inputs / "data.parquet")
    late = pa.array([1 - value for value in rows["late"].to_pylist()])
    pq.write_table(rows.set_column(1, "late", late), image_job.inputs / "data.parquet")
    other = image_job.run(plain).held_out

    assert split == again
    assert split is not None
    assert whole is not None
    assert other is not None
    assert (split.part, split.rows, split.total) == ("part of the data", 150, 300)
    assert (whole.part, whole.rows, whole.total) == ("data", 300, 300)
    assert len({split.digest, whole.digest, other.digest}) == 3


def test_rows_to_learn_from_are_not_those_that_judge() -> None:
    rows = EvaluationRows(np.arange(1001, dtype=np.float32)[:, None], np.zeros(1001))

    fitted, judging = split_rows(rows, seed=3)

    assert not set(fitted.features.ravel()) & set(judging.features.ravel())
    assert len(fitted) + len(judging) == 1001


def _ragged(path: Path) -> None:
    pq.write_table(pa.table({"pixels": [[1.0] * 192, [1.0] * 5] * 20, "late": [0, 1] * 20}), path)


def _other_size(path: Path) -> None:
    write_lists(path, np.zeros((40, 3, 4, 4), np.float32), np.arange(40) % 2)


def _no_rows(path: Path) -> None:
    write_lists(path, np.zeros((0, 3, 8, 8), np.float32), np.zeros(0, np.int64))


def _no_target(path: Path) -> None:
    write_lists(path, np.zeros((40, 3, 8, 8), np.float32), np.full(40, np.nan))


def _other_columns(path: Path) -> None:
    pq.write_table(pa.table({"image": [[1.0] * 192] * 40, "late": [0, 1] * 20}), path)


def _one_row(path: Path) -> None:
    write_lists(path, np.zeros((1, 3, 8, 8), np.float32), np.ones(1))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (_ragged, "lists of different lengths"),
        (_other_size, r"48 columns, counting each number of a list"),
        (_no_rows, "no rows"),
        (_no_target, "no values"),
        (_other_columns, "column pixels"),
        (_one_row, "rows to calibrate or train with, and other rows to judge by"),
    ],
    ids=["ragged", "other size", "no rows", "no target", "other columns", "one row"],
)
def test_data_that_does_not_fit_is_refused_and_nothing_is_written(
    write: Callable[[Path], None], words: str, image_job: Job
) -> None:
    write(image_job.inputs / "data.parquet")

    with pytest.raises(InvalidInput) as caught:
        image_job.run(IMAGES)

    assert words in str(caught.value)
    assert not image_job.outputs.exists()


def test_a_quantized_model_that_is_slower_is_refused(image_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    real = latency.measure_interleaved

    def slowed(models: Any, features: Any, **more: Any) -> Any:
        found = real(models, features, **more)
        for name in found.keys() - {"original", "control", "onnx control"}:
            for seconds in found[name].medians.values():
                seconds[:] = [3 * each for each in seconds]
        for name in ("original", "control"):
            found[name].medians = found["original"].medians
        return found

    monkeypatch.setattr(latency, "measure_interleaved", slowed)
    monkeypatch.setattr(
        latency, "find_best_batch", lambda predict, features, largest: latency.BestBatch(64, 1.0)
    )

    (static,) = image_job.run(IMAGES).variants

    assert static.verdict is OptimizationVerdict.REFUSED
    assert "slower than the original" in static.reason


def test_a_metric_that_does_not_fit_the_model_is_refused(image_job: Job) -> None:
    wrong = IMAGES.model_copy(update={"budget": parse_budget("rmse +1%")})

    with pytest.raises(InvalidInput, match="a metric that fits the target"):
        image_job.run(wrong)


def test_a_corrupt_torch_export_is_refused(job: Job) -> None:
    job.model("model.pt2", b"PK\x03\x04 and nothing more")

    with pytest.raises(InvalidInput, match=r"the torch export model\.pt2 cannot be opened"):
        job.run()


def test_memory_is_measured_in_a_process_of_its_own(network_file: Path, tmp_path: Path) -> None:
    batch = np.zeros((64, 8), np.float32)
    (tmp_path / "broken.onnx").write_bytes(b"nothing")

    found = measure_memory(network_file, batch)

    assert found is not None
    assert network_file.stat().st_size < found < 200 << 20
    assert measure_memory(tmp_path / "broken.onnx", batch) is None
