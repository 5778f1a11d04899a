"""A borrowing job is preempted: saved, queued again and resumed, with nothing lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from controller_processes import ControllerProcesses, run_controllers
from falaj.records.scheduling.snapshot import Quota
from falaj.records.training.jobs import Job, JobState
from falaj.training.tables import attempts
from platforms import make_platform
from polling import eventually, let_pass

pytestmark = pytest.mark.slow

STEPS, HELD_AT = 40, 20
FIT = f"""
import os, select, signal, time, torch
import falaj as fj

torch.set_num_threads(1)
done = []

def train(pause_s, wakeup=None):
    torch.manual_seed(3)
    rows = torch.randn(64, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def loss(out, target):
        time.sleep(pause_s)
        done.append(1)
        if wakeup is not None and len(done) == {HELD_AT}:
            select.select([wakeup], [], [])  # it must not end before it is stopped
        return torch.nn.functional.mse_loss(out, target)

    data = (rows, rows.sum(1, keepdim=True))
    return fj.fit(model, loss, data, steps={STEPS}, batch_size=8, checkpoint_every=1000, seed=1, device="cpu")

if __name__ == "__main__":
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    train(0.08, wakeup if fj.job.attempt == 1 else None)
    (fj.job.outputs / "model.txt").write_text("trained to the end")
"""


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[ControllerProcesses]:
    """Yield controllers with a queue `lab` that has no quota and borrows from `risk`, which owns the whole machine."""
    toml = '[jobs]\npreemption_grace = "30s"'
    with make_platform(tmp_path, toml=toml) as platform, run_controllers(platform, tmp_path) as made:
        platform.queues.set("risk", quota=Quota(cpus=cpus(made)))
        platform.queues.set("lab", quota=Quota(cpus=0), limit=Quota(cpus=cpus(made)))
        yield made


def cpus(controllers: ControllerProcesses) -> int:
    (node,) = controllers.platform.parts.compute.nodes()
    return node.cpus


def in_training(controllers: ControllerProcesses, job: Job) -> bool:
    progress = controllers.platform.jobs.show(job.id).progress
    return progress is not None and progress.step > 3


def verdicts(controllers: ControllerProcesses, job: Job) -> list[str | None]:
    rows = [row for row in controllers.platform.rows(attempts) if row["job"] == job.id]
    return [row["verdict"] for row in sorted(rows, key=lambda row: row["number"])]


def undisturbed() -> list[float]:
    names: dict[str, object] = {"__name__": "undisturbed"}
    exec(compile(FIT, "fit.py", "exec"), names)
    losses: list[float] = names["train"](0).losses  # type: ignore[operator]
    return losses


def test_a_borrower_is_preempted_saved_queued_again_and_resumed_exactly(
    controllers: ControllerProcesses,
) -> None:
    controllers.start_controller()
    borrower = controllers.submit(FIT, name="borrower", queue="lab", cpus=cpus(controllers), timeout="PT5M")
    eventually(lambda: in_training(controllers, borrower))

    urgent = controllers.submit("print('at last')", name="urgent", queue="risk", cpus=cpus(controllers))
    done = controllers.ends(urgent)

    assert (done.state, done.attempt) == (JobState.DONE, 1), done.reason
    again = controllers.ends(borrower)
    assert (again.state, again.attempt, again.preemptions) == (JobState.DONE, 2, 1), again.reason
    assert verdicts(controllers, borrower) == ["preempted", "done"]
    assert "resuming after step" in controllers.log(borrower)
    assert [each.path for each in again.outputs] == ["model.txt"]
    logged, expected = controllers.losses(borrower), undisturbed()
    assert [logged[step] for step in range(1, STEPS + 1)] == [{value} for value in expected]
    (reason,) = [
        row["reason"]
        for row in controllers.platform.rows(attempts)
        if row["job"] == borrower.id and row["verdict"] == "preempted"
    ]
    assert reason == f"preempted: it made room for job {urgent.id}"


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
def test_controllers_killed_during_a_preemption_evict_once_and_lose_nothing(
    controllers: ControllerProcesses, pause_s: float
) -> None:
    controller = controllers.start_controller()
    borrower = controllers.submit(FIT, name="borrower", queue="lab", cpus=cpus(controllers), timeout="PT5M")
    eventually(lambda: in_training(controllers, borrower))
    urgent = controllers.submit("print('at last')", name="urgent", queue="risk", cpus=cpus(controllers))

    eventually(
        lambda: controllers.platform.jobs.show(borrower.id).leaving or verdicts(controllers, borrower),
        every=0.005,
    )
    let_pass(pause_s)  # killed at an arbitrary moment of the preemption
    controller.kill()
    controller.wait()
    controllers.start_controller()

    ended = [controllers.ends(job) for job in (urgent, borrower)]
    assert [(job.state, job.attempt, job.preemptions) for job in ended] == [
        (JobState.DONE, 1, 0),
        (JobState.DONE, 2, 1),
    ], [job.reason for job in ended]
    assert verdicts(controllers, borrower) == ["preempted", "done"]
    made_room = [entry for entry in controllers.platform.entries() if entry["action"] == "jobs.preempt_for"]
    assert [entry["outcome"] for entry in made_room] == ["done"]
    logged, expected = controllers.losses(borrower), undisturbed()
    assert [logged[step] for step in range(1, STEPS + 1)] == [{value} for value in expected]


def test_a_drained_node_saves_its_job_which_resumes_exactly_when_the_node_is_back(
    controllers: ControllerProcesses,
) -> None:
    controllers.start_controller()
    platform = controllers.platform
    job = controllers.submit(FIT, name="drained", queue="risk", cpus=cpus(controllers), timeout="PT5M")
    eventually(lambda: in_training(controllers, job))
    (machine,) = platform.nodes.list()

    platform.nodes.drain(machine.node.name, reason="a fan is replaced")
    eventually(lambda: platform.nodes.list()[0].jobs == 0)
    assert platform.jobs.show(job.id).state is JobState.QUEUED
    assert platform.jobs.explain(job.id).words.endswith(f"cordoned: {machine.node.name}")

    platform.nodes.uncordon(machine.node.name)
    done = controllers.ends(job)
    assert (done.state, done.attempt) == (JobState.DONE, 2), done.reason
    assert verdicts(controllers, job) == ["moved", "done"]
    logged, expected = controllers.losses(job), undisturbed()
    assert [logged[step] for step in range(1, STEPS + 1)] == [{value} for value in expected]
