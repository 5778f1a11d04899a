"""`falaj train --estimate` runs the script up to its fit, and a job that cannot fit is never queued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import falaj as fj
from command_line import CommandLine, command_line, make_template
from falaj.errors import InvalidInput
from falaj.records.training.jobs import JobMemoryEstimate, JobSpec, TrainingPlan
from falaj.sdk import estimation
from falaj.sdk.estimation import estimate_script

TRAINS = """
import sys, torch
import falaj as fj
width = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
data = torch.ones(64, 8), torch.ones(64, 1)
print("the script goes as far as this")
fj.fit(model, torch.nn.functional.mse_loss, data, batch_size=64, steps=1)
open("trained", "w").close()
"""

EMPTY = """
import torch
import falaj as fj
model = torch.nn.Linear(8, 1, device="meta")
fj.fit(model, torch.nn.functional.mse_loss, (torch.ones(64, 8), torch.ones(64, 1)), steps=1)
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(
    template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))
    (tmp_path / "trains.py").write_text(TRAINS)
    (tmp_path / "prints.py").write_text("print('nothing to train')")
    (tmp_path / "fails.py").write_text("import falaj\nraise ValueError('no such column')")
    (tmp_path / "empty.py").write_text(EMPTY)
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


@pytest.mark.slow
def test_a_job_is_queued_with_its_estimate(falaj: CommandLine) -> None:
    ran = falaj.done("train", "trains.py", "1024", "--estimate", "--detach")

    (job,) = falaj.json("jobs", "list")["items"]
    shown = falaj.done("jobs", "show", job["id"]).out
    words = "about 900 KiB a process (one process, fp32, batch 64): parameters 40.5 KiB, gradients 40.5 KiB"
    assert f"memory: {words}" in ran.err
    assert words in " ".join(shown.split())
    assert not (falaj.folder / "trained").exists()


@pytest.mark.slow
def test_a_job_that_does_not_fit_is_refused_with_its_estimate_and_not_queued(falaj: CommandLine) -> None:
    ran = falaj("train", "trains.py", "200000", "--estimate", "--memory", "16MiB", "--detach")

    assert ran.status == 2
    assert "does not fit in the memory of any machine here" in ran.err
    assert "--estimate" in ran.err
    assert "14.7 MiB a process" in ran.err
    assert "fix      one process, fp32" in ran.err
    assert "--memory 1GiB" in ran.err
    assert falaj.json("jobs", "list")["items"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("prints.py", "ended without calling fj.fit"),
        ("fails.py", "failed before it called fj.fit: ValueError: no such column"),
        ("empty.py", "fj.fit refused it: this cannot be trained"),
    ],
)
def test_a_script_that_never_calls_fit_is_not_submitted(falaj: CommandLine, script: str, words: str) -> None:
    ran = falaj("train", script, "--estimate", "--detach")

    assert ran.status == 2
    assert words in ran.err
    assert falaj.json("jobs", "list")["items"] == []


@pytest.mark.slow
def test_python_has_the_same_option(falaj: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    way = TrainingPlan(
        processes=1, layout="one process", precision="fp32", micro_batches=1, peak_bytes=9, as_asked=True
    )
    found = JobMemoryEstimate(
        device="cpu",
        batch_size=1,
        parameters_bytes=1,
        gradients_bytes=1,
        state_bytes=2,
        activations_bytes=5,
        method="traced",
        ways=(way,),
    )
    monkeypatch.setattr(estimation, "estimate_script", lambda script, spec: found)

    with fj.open(falaj.home) as platform:
        job = platform.train(falaj.folder / "trains.py", args=["64"], estimate=True, cpus=1)
        plain = platform.train(falaj.folder / "trains.py", args=["64"])

    assert job.spec.estimate == found
    assert plain.spec.estimate is None


def test_a_script_that_takes_too_long_is_ended(falaj: CommandLine) -> None:
    (falaj.folder / "sleeps.py").write_text("import time\nprint('begins', flush=True)\ntime.sleep(600)")

    with pytest.raises(InvalidInput, match=r"did not come to fj.fit within 1 s"):
        estimate_script(falaj.folder / "sleeps.py", JobSpec(name="a", script="sleeps.py"), limit_s=1.0)
