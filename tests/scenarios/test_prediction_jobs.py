"""A batch prediction as a job that is killed or preempted goes on where it stopped, with no row lost or twice."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_runs import SIGNATURE, customers, scores
from controller_processes import ControllerProcesses, run_controllers
from falaj.records.registry import TensorSpec
from falaj.records.scheduling.snapshot import Quota
from falaj.records.training.jobs import Job, JobState
from platforms import make_platform
from polling import eventually

pytestmark = pytest.mark.slow

ROWS, GROUP_ROWS = 700_003, 90_000
MODEL = """
import json
import time


def load(files):
    global WEIGHTS
    WEIGHTS = json.loads(files["weights.json"])


def predict(inputs):
    time.sleep(0.06)  # a part takes two seconds, so that there is time to kill it
    return {"score": sum(inputs["X"][:, place] * weight for place, weight in enumerate(WEIGHTS))}
"""
OUTPUTS = (TensorSpec(name="score", dtype="float32", shape=(-1,)),)
PROGRAM = b"falaj.assembly.prediction"


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[ControllerProcesses]:
    """Yield controllers with a slow model, rows, and a queue `lab` that borrows from `risk`."""
    toml = '[jobs]\npreemption_grace = "30s"'
    with make_platform(tmp_path, toml=toml) as platform, run_controllers(platform, tmp_path) as made:
        cpus = platform.parts.compute.nodes()[0].cpus
        platform.queues.set("risk", quota=Quota(cpus=cpus))
        platform.queues.set("lab", quota=Quota(cpus=0), limit=Quota(cpus=cpus))
        files = [platform.blobs.upload(iter([each])).id for each in (MODEL.encode(), b"[1.0, 10.0, 100.0]")]
        platform.models.register(
            "slow", files=tuple(files), paths=("model.py", "weights.json"), inputs=SIGNATURE, outputs=OUTPUTS
        )
        sink = io.BytesIO()
        pq.write_table(customers(ROWS), sink, row_group_size=GROUP_ROWS)
        platform.put("rows", sink.getvalue())
        made.start_controller()
        yield made


def job_of(controllers: ControllerProcesses) -> Job:
    def jobs() -> list[Job]:
        return [
            each for each in controllers.platform.jobs.list().items if each.spec.name.startswith("predict-")
        ]

    eventually(lambda: bool(jobs()))
    return jobs()[0]


def saved_rows(controllers: ControllerProcesses, job: Job) -> int:
    assert not controllers.state(job).ended, controllers.log(job)
    return max((each.step for each in controllers.platform.jobs.checkpoints(job.id)), default=0)


def processes_of(job: Job) -> list[int]:
    """Return the processes of the prediction, as the machine sees them."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command, environment = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        if folder.name.isdigit() and PROGRAM in command and f"FALAJ_JOB={job.id}".encode() in environment:
            found.append(int(folder.name))
    return found


def require_predicted(controllers: ControllerProcesses, work: Any) -> None:
    eventually(lambda: controllers.platform.workflows.show(work.id).state.ended)
    made: pa.Table = pq.read_table(io.BytesIO(controllers.platform.get("scores")))
    assert made.column_names == ["id", "score"]
    assert np.array_equal(made["id"].to_numpy(), np.arange(ROWS))
    assert np.allclose(made["score"].to_numpy(), scores(customers(ROWS)))


def test_a_job_whose_process_is_killed_goes_on_where_it_stopped(controllers: ControllerProcesses) -> None:
    platform = controllers.platform
    work = platform.predict("slow@1", "blob:rows", "scores")
    job = job_of(controllers)
    eventually(lambda: saved_rows(controllers, job) > 100_000)

    killed = processes_of(job)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    done = controllers.ends(job)

    assert killed
    assert (done.state, done.attempt) == (JobState.DONE, 2), done.reason
    assert "resuming after row " in controllers.log(job)
    require_predicted(controllers, work)
    assert [each.parts for each in platform.jobs.checkpoints(job.id)] == [()]


def test_a_preempted_job_goes_on_where_it_stopped(controllers: ControllerProcesses) -> None:
    platform = controllers.platform
    cpus = platform.parts.compute.nodes()[0].cpus
    work = platform.predict("slow@1", "blob:rows", "scores", queue="lab", cpus=cpus)
    job = job_of(controllers)
    eventually(lambda: (platform.jobs.show(job.id).progress or job.progress) is not None)
    eventually(lambda: platform.jobs.show(job.id).progress.step > 0)  # type: ignore[union-attr]

    urgent = controllers.submit("print('at last')", name="urgent", queue="risk", cpus=cpus)
    controllers.ends(urgent)
    kept = saved_rows(controllers, job)
    done = controllers.ends(job)

    assert kept > 100_000
    assert (done.state, done.attempt, done.preemptions) == (JobState.DONE, 2, 1), done.reason
    assert f"resuming after row {kept}" in controllers.log(job)
    require_predicted(controllers, work)
