"""`fj.job`: the same script inside a job and alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import falaj as fj
from falaj.training.runtime.agent.job import JobContext
from falaj.training.runtime.errors import InvalidTraining


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FALAJ_JOB", "FALAJ_INPUTS", "FALAJ_OUTPUTS", "FALAJ_AGENT", "FALAJ_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)


def test_a_script_runs_without_a_platform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = JobContext()

    job.params(lr=0.1)
    job.log(step=3, loss=0.25)
    job.flush()

    assert (job.id, job.attempt) == (None, 1)
    assert job.outputs.resolve() == tmp_path / "outputs"
    assert job.outputs.is_dir()
    assert capsys.readouterr().err == "params: lr=0.1\nstep 3: loss=0.25\n"


def test_inputs_are_found_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    for name in ("flights.v2.parquet", "spine.csv", "raw", "a.b"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    (folder / "model").mkdir()
    monkeypatch.setenv("FALAJ_INPUTS", str(folder))

    inputs = fj.job.inputs

    assert inputs["flights.v2"] == folder / "flights.v2.parquet"
    assert inputs["spine"].suffix == ".csv"
    assert inputs["raw"].read_text() == inputs["a.b"].read_text() == "x"
    assert inputs["model"].is_dir()
    assert len(inputs) == 5
    with pytest.raises(InvalidTraining, match=r"--dataset churn=REFERENCE"):
        inputs["churn"]


def test_there_are_no_inputs_without_a_folder() -> None:
    assert dict(JobContext().inputs) == {}
