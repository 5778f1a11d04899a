"""The optimization job: make, measure and evaluate variants, and report failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from falaj.errors import InvalidInput
from falaj.optimization.runtime import latency
from falaj.optimization.runtime.export import export_onnx
from falaj.optimization.runtime.job import optimize
from falaj.optimization.settings import OptimizationSettings, parse_settings
from falaj.records.optimization import AcceptanceBudget, OptimizationReport, OptimizationVerdict

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
    served = [int8.speedup[name] for name in latency.SERVED]
    faster = any(each.low >= 1.1 for each in served)
    slower = any(each.high < 1 / 1.1 for each in served)
    assert (int8.verdict is OptimizationVerdict.ACCEPTED) == (within and faster and not slower)
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


def launch(job: Job, *arguments: str) -> subprocess.CompletedProcess[str]:
    folders = {"FALAJ_INPUTS": str(job.inputs), "FALAJ_OUTPUTS": str(job.outputs)}
    command = [sys.executable, "-m", "falaj.optimization.runtime", *arguments]
    return subprocess.run(command, env=os.environ | folders, capture_output=True, text=True, check=False)


def test_the_program_runs_under_the_contract_of_jobs(job: Job, boosted: Any, rows: Learnable) -> None:
    export_onnx(boosted, job.inputs / "model" / "model.onnx", sample=rows.holed[:50])

    ran = launch(job, *SETTINGS.arguments())

    assert (ran.returncode, ran.stderr) == (0, "")
    assert "evaluating log_loss on 1500 rows" in ran.stdout
    assert "int8 refused: trees only compare" in ran.stdout
    report = json.loads((job.outputs / "report.json").read_text())
    assert [each["recipe"] for each in report["variants"]] == ["onnx", "int8", "fp16"]
    assert (job.outputs / "variants" / "onnx" / "model.onnx").exists()


def test_a_fault_is_reported_with_a_message(job: Job) -> None:
    ran = launch(job, *SETTINGS.arguments())

    assert ran.returncode == 1
    assert ran.stderr.startswith("error[input.invalid] model is not valid")
    assert "Traceback" not in ran.stderr
