"""The certificate of a run: its interruptions, and whether recomputed losses were equal."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import falaj as fj
from falaj.ports.launcher import AttemptState
from falaj.training.runtime.agent.agents import FolderAgent
from falaj.training.runtime.checkpointing.certificate import Certificate, digest, verify_certificate
from falaj.training.runtime.checkpointing.sample_ledger import expected_head
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.errors import CertificateInvalid
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.reporting import report
from job_harness import DONE, JobHarness
from parallel_runs import BATCH_SIZE, SAMPLES, STEPS, runs
from polling import eventually

CERTIFIED = Path(__file__).with_name("certified_fit.py")
MICRO_BATCHES = 2
ROWS = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))


class Killed(BaseException):
    """Interrupts a run as abruptly as one process allows."""


class InterruptibleModel(nn.Module):
    """Interrupts its run at the `deadly` step of this process; `nondeterministic` adds noise."""

    def __init__(self, deadly: int = 0, *, nondeterministic: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self._left, self._nondeterministic = (deadly - 1) * MICRO_BATCHES + 1, nondeterministic

    def forward(self, rows: Tensor) -> Tensor:
        self._left -= 1
        if self._left == 0:
            raise Killed
        noise = int.from_bytes(os.urandom(4), "big") / 2**32 if self._nondeterministic else 0.0
        output: Tensor = self.layers(rows) + noise
        return output


@pytest.fixture(autouse=True)
def losses_are_logged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SEND_INTERVAL_S", 0.0)


def short_fit(run: Path | FolderAgent | None, model: nn.Module, **changes: Any) -> FitResult:
    options = {
        "batch_size": 8,
        "steps": 12,
        "checkpoint_every": 4,
        "accumulate": MICRO_BATCHES,
        "exact": True,
        **changes,
    }
    return fit(
        model,
        nn.functional.mse_loss,
        (ROWS, ROWS.sum(1, keepdim=True)),
        device="cpu",
        tune="off",
        run=run,
        **options,
    )


def broken_off(run: Path | None, step: int, **changes: Any) -> None:
    """Interrupt at this step of the attempt."""
    with pytest.raises(Killed):
        short_fit(
            run, InterruptibleModel(step, nondeterministic=changes.pop("nondeterministic", False)), **changes
        )


# ---------------------------------------------------------------------------------------------- content


@pytest.mark.slow
def test_a_rank_killed_in_an_exact_run_is_a_point_of_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel_runs.SCRIPT", CERTIFIED)
    run = tmp_path / "run"
    kept = {"exact": True, "dropout": 0.3, "run": str(run), "checkpoint_every": 4}

    straight, dead, last = runs(
        tmp_path,
        (1, kept | {"run": str(tmp_path / "straight")}),
        (2, kept | {"deadly": {"1": 50}}),
        (4, kept),
    )

    assert dead.died
    assert last.losses == straight.losses[last.resumed_from :]
    certificate = verify_certificate(
        run / "certificate.json", samples=SAMPLES, batch_size=BATCH_SIZE, seed=3, steps=STEPS, run=run
    )
    (point,) = certificate.kill_points
    assert (point.step, point.layout_before, point.layout) == (last.resumed_from, "ddp 2", "ddp 4")
    assert point.reached in (5, 6)  # six steps, of eight samples each, were read before the fiftieth sample
    assert certificate.compared == point.reached - point.step
    assert (certificate.exact, certificate.largest_difference) == (True, 0.0)


def test_an_attempt_that_never_reached_a_checkpoint_is_not_forgotten(tmp_path: Path) -> None:
    broken_off(tmp_path, 7)  # after the checkpoint of step 4
    broken_off(tmp_path, 2)  # at its second step, before any checkpoint of its own
    broken_off(tmp_path, 1)

    certificate = short_fit(tmp_path, InterruptibleModel()).certificate

    assert [(each.step, each.reached, each.killed) for each in certificate.resumes] == [
        (4, 6, True),
        (4, 6, True),
        (4, 6, True),
    ]
    assert certificate.compared == 3  # step 5 twice, and step 6 once
    assert certificate == verify_certificate(tmp_path / "certificate.json", run=tmp_path)


def test_a_run_that_ended_normally_records_no_kill(tmp_path: Path) -> None:
    short_fit(tmp_path, InterruptibleModel(), steps=6)

    certificate = short_fit(tmp_path, InterruptibleModel()).certificate

    assert [(each.step, each.reached, each.killed) for each in certificate.resumes] == [(6, 6, False)]
    assert certificate.kill_points == ()
    assert certificate.exact


def test_a_call_with_nothing_left_to_do_is_no_resume(tmp_path: Path) -> None:
    short_fit(tmp_path, InterruptibleModel())

    assert short_fit(tmp_path, InterruptibleModel()).certificate.resumes == ()


def test_a_run_that_is_not_reproducible_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_off(tmp_path, 7, nondeterministic=True)

    certificate = short_fit(tmp_path, InterruptibleModel(nondeterministic=True)).certificate

    assert certificate.largest_difference > 0
    assert (certificate.asked_exact, certificate.exact, certificate.is_ledger_right) == (True, False, True)
    assert "ERROR: this run is not exact: the loss of step 5 is" in capsys.readouterr().err
    assert not verify_certificate(tmp_path / "certificate.json", run=tmp_path).exact


def test_the_loss_difference_is_kept_over_later_kills(tmp_path: Path) -> None:
    broken_off(tmp_path, 7, nondeterministic=True)
    broken_off(tmp_path, 6, nondeterministic=True)  # computes 5 and 6 again, and saves after 8

    certificate = short_fit(tmp_path, InterruptibleModel()).certificate

    assert certificate.largest_difference > 0
    assert len(certificate.kill_points) == 2
    verify_certificate(tmp_path / "certificate.json", run=tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ({}, {"precision": "bf16"}, "precision is bf16, was fp32"),
        ({"exact": False}, {}, "exact is True, was False"),
    ],
)
def test_a_run_resumed_with_other_options_is_not_exact(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], change: str
) -> None:
    short_fit(tmp_path, InterruptibleModel(), steps=4, **before)
    short_fit(tmp_path, InterruptibleModel(), steps=8, **after)

    certificate = short_fit(tmp_path, InterruptibleModel(), **after).certificate

    assert change in certificate.changed
    assert (certificate.exact, certificate.largest_difference) == (False, 0.0)
    assert certificate == verify_certificate(tmp_path / "certificate.json", run=tmp_path)


def test_a_changed_option_without_a_resume_is_not_recorded(tmp_path: Path) -> None:
    short_fit(tmp_path, InterruptibleModel())

    assert short_fit(tmp_path, InterruptibleModel(), precision="bf16").certificate.changed == ()


def test_an_attempt_without_a_checkpoint_is_compared_too(tmp_path: Path) -> None:
    """It was killed while its first checkpoint, which may be large, was being written."""
    broken_off(tmp_path, 3)
    shutil.rmtree(tmp_path / "checkpoints")
    other = InterruptibleModel()
    nn.init.ones_(next(other.parameters()))

    certificate = short_fit(tmp_path, other).certificate

    assert [(each.step, each.reached, each.killed) for each in certificate.resumes] == [(0, 2, True)]
    assert (certificate.compared, certificate.exact) == (2, False)
    assert certificate == verify_certificate(tmp_path / "certificate.json", run=tmp_path)


def test_runs_that_are_not_exact_count_samples_but_leave_no_file(tmp_path: Path) -> None:
    broken_off(tmp_path, 7, exact=False)

    certificate = short_fit(tmp_path, InterruptibleModel(), exact=False).certificate

    assert (len(certificate.kill_points), certificate.compared, certificate.largest_difference) == (1, 2, 0.0)
    assert (certificate.asked_exact, certificate.exact, certificate.is_ledger_right) == (False, False, None)
    assert not (tmp_path / "certificate.json").exists()


def test_without_a_run_folder_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FALAJ_OUTPUTS", raising=False)

    result = short_fit(None, InterruptibleModel())

    assert result.certificate.exact
    assert result.certificate.ledger == result.ledger == expected_head(BatchPlan(40, 8, seed=0), 12)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- forgeries


@pytest.fixture
def certified(tmp_path: Path) -> Path:
    broken_off(tmp_path, 7)
    short_fit(tmp_path, InterruptibleModel())
    return tmp_path / "certificate.json"


def forge(path: Path, **changes: Any) -> None:
    """Change the certificate, and its digest too."""
    content = json.loads(path.read_text()) | changes
    del content["sha256"]
    path.write_text(json.dumps(content | {"sha256": digest(content)}))


def test_a_changed_certificate_is_detected(certified: Path) -> None:
    content = certified.read_text()
    assert '"steps": 12' in content
    certified.write_text(content.replace('"steps": 12', '"steps": 13'))

    with pytest.raises(CertificateInvalid, match="changed after it was written"):
        fj.verify_certificate(certified)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"ledger": "0" * 64}, "ledger"),
        ({"steps": 11}, "ledger"),
        ({"largest_difference": 0.5}, "exact"),
        ({"exact": False}, "exact"),
        ({"changed": ["device is cuda, was cpu"]}, "exact"),
        ({"largest_difference": 0.5, "exact": False}, "largest_difference"),
        ({"compared": 0}, "compared"),
        ({"facts": {}}, "facts"),
        ({"version": 2}, "version"),
    ],
)
def test_claims_of_a_forged_certificate_are_recomputed(
    certified: Path, changes: dict[str, Any], where: str
) -> None:
    forge(certified, **changes)

    with pytest.raises(CertificateInvalid) as refusal:
        verify_certificate(certified, run=certified.parent)

    assert where in [fault.where for fault in refusal.value.faults]


@pytest.mark.parametrize(
    "given", [{"samples": 41}, {"batch_size": 4}, {"seed": 1}, {"steps": 13}, {"drop_last": True}]
)
def test_a_certificate_of_other_batches_is_refused(certified: Path, given: dict[str, Any]) -> None:
    with pytest.raises(CertificateInvalid) as refusal:
        verify_certificate(certified, **given)

    assert [fault.where for fault in refusal.value.faults] == list(given)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sha256": 1, "version": 1}', "\x00"])
def test_an_invalid_certificate_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(text)

    with pytest.raises(CertificateInvalid, match="not a certificate"):
        verify_certificate(path)


def test_a_run_that_saw_other_samples_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of step 9 is not the one in the plan."""
    broken_off(tmp_path, 7)
    real, expected = BatchPlan.indices, expected_head(BatchPlan(40, 8, seed=0), 12)

    with monkeypatch.context() as during:
        during.setattr("falaj.training.runtime.checkpointing.certificate.expected_head", lambda *_: expected)
        during.setattr(BatchPlan, "indices", lambda plan, step: real(plan, step + (step == 9)))
        certificate = short_fit(tmp_path, InterruptibleModel()).certificate

    assert (certificate.is_ledger_right, certificate.exact) == (False, False)
    assert not verify_certificate(tmp_path / "certificate.json").exact


# ------------------------------------------------------------------------------------- on a platform


@pytest.mark.slow
def test_the_certificate_is_an_artifact_of_the_jobs_run(
    light_harness: JobHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = light_harness
    harness.launcher.program = lambda _: AttemptState("running")
    job = harness.submit()
    reconciler = harness.reconciler()
    reconciler.tick()
    folder = harness.host.folder / job.id
    eventually((folder / "1.agent" / "agent.sock").exists)
    for name, value in harness.agent_variables(job).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FALAJ_OUTPUTS", str(folder / "1" / "outputs"))

    broken_off(None, 7)
    certificate = short_fit(None, InterruptibleModel()).certificate
    harness.launcher.known[f"{job.id}/1"] = DONE

    def has_ended() -> bool:
        reconciler.tick()
        return bool(harness.jobs.show(job.id).state.ended)

    eventually(has_ended)
    reconciler.stop()
    assert_survived_one_kill(certificate)
    run = harness.platform.runs.show(job.run)
    (blob,) = (each.blob for each in run.artifacts if each.path == "certificate.json")
    (tmp_path / "fetched.json").write_bytes(harness.platform.get(blob))
    assert verify_certificate(tmp_path / "fetched.json", samples=40, batch_size=8, steps=12) == certificate
    assert "resumed.1" in {each.key for each in run.params}


def assert_survived_one_kill(certificate: Certificate) -> None:
    (point,) = certificate.kill_points
    assert (point.step, point.reached) == (4, 6)
    assert (certificate.compared, certificate.largest_difference, certificate.exact) == (2, 0.0, True)
