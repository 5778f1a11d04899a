"""The records of a fit that ran as a job: metrics, parameters, plan, hardware, artifacts and lineage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from falaj.ports.launcher import AttemptState
from falaj.training.runtime.fit import FitResult, fit
from job_harness import DONE, JobHarness
from polling import eventually


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))


def train(directory: Path, agent: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> FitResult:
    """Run the job's script with the environment variables of a job."""
    for name, value in agent.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FALAJ_OUTPUTS", str(directory / "outputs"))
    rows = torch.randn(64, 3)
    return fit(
        nn.Linear(3, 1),
        nn.functional.mse_loss,
        (rows, rows[:, :1]),
        batch_size=8,
        epochs=2,
        device="cpu",
        profile=3,
        tensorboard=True,
    )


@pytest.mark.slow
def test_fit_in_a_job_is_recorded_completely(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = light_harness
    harness.launcher.program = lambda _: AttemptState("running")
    rows = harness.platform.blobs.upload(iter([b"rows"]))
    job = harness.submit(inputs={"rows": rows.id})
    reconciler = harness.reconciler()
    reconciler.tick()
    folder = harness.host.folder / job.id
    eventually((folder / "1.agent" / "agent.sock").exists)

    result = train(folder / "1", harness.agent_variables(job), monkeypatch)
    harness.launcher.known[f"{job.id}/1"] = DONE

    def has_ended() -> bool:
        reconciler.tick()
        return bool(harness.jobs.show(job.id).state.ended)

    eventually(has_ended)
    reconciler.stop()
    run = harness.platform.runs.show(job.run)
    last = {each.key: (each.last_step, each.last) for each in run.metrics}
    assert last["loss"] == (16, pytest.approx(result.losses[-1]))
    assert last["samples_per_second"] == (16, pytest.approx(result.samples_per_second))
    assert {"goodput", "step_time", "profile/input"} <= last.keys()
    logged = {each.key: each.value for each in run.params}
    assert (logged["plan"], logged["batch_size"], logged["epochs"]) == ("fp32", "8", "2")
    assert (logged["data.samples"], logged["model.parameters"]) == ("64", "4")
    assert logged["job.input.rows"] == rows.id
    assert logged["hardware.cores"].isdecimal()
    assert logged["profile"] == (result.profile and result.profile.sentence)
    assert logged["ledger.16"] == result.ledger
    kept = [artifact.path for artifact in run.artifacts]
    assert any(path.endswith(".pt.trace.json") for path in kept)
    assert any(path.startswith("tensorboard/events.out.tfevents.") for path in kept)
    above = {node.id for node in harness.platform.lineage.graph(job.run) if node.depth < 0}
    below = {node.id for node in harness.platform.lineage.graph(job.run) if node.depth > 0}
    assert {rows.id, job.code} <= above
    assert {artifact.blob for artifact in run.artifacts} <= below
