"""Jobs as real processes: controllers and jobs are killed, and every job ends exactly once."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import falaj as fj
from command_line import restored_log
from controller_processes import ControllerProcesses, run_controllers
from falaj.apps.cli.app import run
from falaj.records.training.jobs import JobState
from falaj.training.tables import attempts
from platforms import make_platform
from polling import PATIENCE_S, eventually, let_pass

pytestmark = pytest.mark.slow

STEPS = 12
SLOW = f"""
import time
import falaj as fj
fj.job.log(step=0, started=1)
for step in range({STEPS}):
    fj.job.log(step=step, loss=1 / (step + 1))
    fj.job.flush()
    print("step", step, flush=True)
    time.sleep(0.1)
(fj.job.outputs / "result.txt").write_text("done")
"""

ENDLESS = """
import time
print("it begins", flush=True)
while True:
    time.sleep(0.05)
"""

FIT = """
import os, signal, torch
import falaj as fj

torch.set_num_threads(1)

def make():
    torch.manual_seed(3)
    rows = torch.randn(64, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    return model, (rows, rows.sum(1, keepdim=True))

calls = 0

def loss(out, target):
    global calls
    calls += 1
    if calls == 24 and os.environ.get("FALAJ_ATTEMPT") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.mse_loss(out, target)

def train(**options):
    model, data = make()
    return fj.fit(model, loss, data, steps=40, batch_size=8, checkpoint_every=5, seed=1, device="cpu", **options)

if __name__ == "__main__":
    train()
"""


def falaj(words: list[str]) -> int:
    """Run a command in this process."""
    with restored_log():
        return run(words)


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[ControllerProcesses]:
    with make_platform(tmp_path) as platform, run_controllers(platform, tmp_path) as made:
        yield made


def test_jobs_outlive_controllers_that_are_killed_while_they_start_and_run(
    controllers: ControllerProcesses,
) -> None:
    jobs = [controllers.submit(SLOW, name=f"slow-{number}") for number in range(3)]
    controller = controllers.start_controller()
    eventually(lambda: controllers.state(jobs[0]) is JobState.RUNNING)  # recorded, not started

    for pause in (0.0, 0.05, 0.6, 0.3):
        let_pass(pause)  # killed at an arbitrary moment
        controller.kill()
        controller.wait()
        controller = controllers.start_controller()
        eventually(controllers.is_led_by_the_newest)

    ended = [controllers.ends(job) for job in jobs]
    assert [(job.state, job.attempt, len(job.outputs)) for job in ended] == [(JobState.DONE, 1, 1)] * 3
    assert [controllers.points(job) for job in jobs] == [{"started": 1, "loss": STEPS}] * 3
    assert len(controllers.platform.rows(attempts)) == len(jobs)
    log = b"".join(controllers.platform.jobs.logs(jobs[0].id)).decode()
    assert log.count("step 3\n") == 1
    assert list((controllers.platform.home.path / "launches").iterdir()) == []


def test_a_killed_fit_resumes_exactly_from_its_checkpoint(controllers: ControllerProcesses) -> None:
    controllers.start_controller()
    job = controllers.submit(FIT, retries=1, timeout="PT2M")

    done = controllers.ends(job)

    assert (done.state, done.attempt) == (JobState.DONE, 2), done.reason
    undisturbed: dict[str, object] = {"__name__": "undisturbed"}
    exec(compile(FIT, "fit.py", "exec"), undisturbed)
    expected = undisturbed["train"]().losses  # type: ignore[operator]
    by_step = controllers.losses(job)
    assert [by_step[step] for step in range(1, 41)] == [{value} for value in expected]
    log = b"".join(controllers.platform.jobs.logs(job.id)).decode()
    assert re.search("resuming after step (15|20)\n", log)  # the checkpoint of step 20 may have been pending
    assert [each.step for each in controllers.platform.jobs.checkpoints(job.id)] == [40, 35, 30]


def test_jobs_fail_are_followed_requeued_and_cancelled(controllers: ControllerProcesses) -> None:
    controller = controllers.start_controller()
    failing = controllers.submit("raise ValueError('no such column: delay')")
    endless = controllers.submit(ENDLESS, name="endless")

    follow = controllers.platform.jobs.logs(endless.id, follow=True)
    assert next(piece for piece in follow if piece) == b"it begins\n"
    failed = controllers.ends(failing)
    assert (failed.state, failed.exit_code) == (JobState.FAILED, 1)
    assert "ValueError: no such column: delay" in (failed.reason or "")

    controller.send_signal(signal.SIGTERM)
    assert controller.wait(PATIENCE_S) == 0
    back = controllers.platform.jobs.show(endless.id)
    assert (back.state, back.reason) == (JobState.QUEUED, "interrupted: the platform stopped")

    controllers.start_controller()
    eventually(lambda: controllers.state(endless) is JobState.RUNNING)
    controllers.platform.jobs.cancel(endless.id)
    cancelled = controllers.ends(endless)
    assert (cancelled.state, cancelled.attempt) == (JobState.CANCELLED, 2)
    assert b"".join(follow).strip() in (b"it begins", b"")  # of the second attempt, if it got that far
    assert controllers.platform.jobs.retry(endless.id).state is JobState.QUEUED


def test_a_home_without_a_server_trains_on_its_training_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    rows = tmp_path / "rows.csv"
    rows.write_text("carrier,event_time,delay\nAA,2013-01-01T00:00:00Z,5\nAA,2013-01-02T00:00:00Z,7\n")
    (tmp_path / "train.py").write_text(
        "import pyarrow.parquet as pq, falaj as fj, sys\n"
        "table = pq.read_table(fj.job.inputs['delays'])\n"
        "print(table.column_names, sys.argv[1:], pq.read_table(fj.job.inputs['raw']).num_rows)\n"
        "pq.write_table(table, fj.job.outputs / 'again.parquet')\n"
        "assert '--fail' not in sys.argv\n"
    )
    home = tmp_path / "home"
    with fj.open(home) as platform:
        platform.apply(
            [
                fj.Entity(name="carrier", key="carrier"),
                fj.FeatureView(
                    name="flown",
                    entities=("carrier",),
                    columns=(fj.Feature(name="delay", type="float"),),  # type: ignore[arg-type]
                ),
            ]
        )
        platform.ingest("flown", rows)
        spine = tmp_path / "spine.csv"
        spine.write_text("carrier,event_time\nAA,2013-01-03T00:00:00Z\n")
        platform.training_set("delays", spine=spine, views=["flown"])

    script = ["--home", str(home), "train", str(tmp_path / "train.py"), "--dataset", "delays"]
    script += ["--dataset", "raw=view:flown"]
    assert falaj([*script, "quick"]) == 0
    printed = capsys.readouterr().out
    assert "flown__delay" in printed
    assert "['quick'] 2" in printed
    assert "is done" in printed
    assert falaj([*script, "--", "--fail"]) == 1
    assert "AssertionError" in capsys.readouterr().out
    with fj.open(home) as platform:
        done = next(job for job in platform.jobs.list().items if job.state is JobState.DONE)
        (output,) = done.outputs
        (tmp_path / "again.parquet").write_bytes(platform.get(output.blob))
    assert pq.read_table(tmp_path / "again.parquet")["flown__delay"].to_pylist() == [7.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "a Python script that is there"),
        (["train.py", "--gpus", "99"], "--gpus"),
        (["train.py", "--dataset", "x=unknown"], "a training set, view, model version or blob that is there"),
        (["train.py", "--env", "FALAJ_JOB=1"], "FALAJ_"),
        (["train.py", "--timeout", "soon"], "--timeout"),
        (["train.py", "--cpus", "none"], "cpus"),
    ],
)
def test_invalid_training_is_reported(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print(1)")

    status = falaj(["--home", str(tmp_path / "home"), "train", *words])

    assert status in (1, 2)
    assert message in capsys.readouterr().err
