"""A job of two processes, one of which is killed, ends with a certificate that can be verified."""

from __future__ import annotations

from pathlib import Path

import pytest

import falaj as fj
from controller_processes import run_controllers
from falaj.records.training.jobs import JobState
from platforms import make_platform

pytestmark = pytest.mark.slow

FIT = """
import os, signal, torch
import falaj as fj
from falaj.training.runtime.reporting import report

report.SEND_INTERVAL_S = 0.0  # so that there are losses to compare
torch.set_num_threads(1)
torch.manual_seed(3)
rows = torch.randn(64, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
calls = 0

def loss(out, target):
    global calls
    calls += 1
    if calls == 60 and fj.job.attempt == 1 and os.environ["RANK"] == "1":  # its four of eight a step: the fifteenth
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.mse_loss(out, target)

data = (rows, rows.sum(1, keepdim=True))
fj.fit(model, loss, data, steps=30, batch_size=8, checkpoint_every=10, exact=True, seed=1, device="cpu", tune="off")
"""


def test_a_job_with_a_killed_rank_ends_with_its_certificate(tmp_path: Path) -> None:
    with make_platform(tmp_path) as platform, run_controllers(platform, tmp_path) as controllers:
        controllers.start_controller()
        job = controllers.submit(FIT, framework="torch", processes=2, retries=1, timeout="PT3M")

        done = controllers.ends(job)

        assert (done.state, done.attempt) == (JobState.DONE, 2), done.reason
        (blob,) = (
            each.blob for each in platform.runs.show(job.run).artifacts if each.path == "certificate.json"
        )
        path = tmp_path / "certificate.json"
        path.write_bytes(platform.get(blob))

    certificate = fj.verify_certificate(path, samples=64, batch_size=8, seed=1, steps=30)
    (point,) = certificate.kill_points
    assert point.step in (0, 10)  # the checkpoint of step 10 may have been pending
    assert point.reached in (13, 14)  # the other process may have had no time for the last one
    assert point.layout == "ddp 2"
    assert certificate.compared == point.reached - point.step
    assert (certificate.exact, certificate.largest_difference) == (True, 0.0)
