"""Trials are jobs in the queue: quotas, budgets and preemption hold for them, and none of it is a failed trial."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from controller_processes import ControllerProcesses, run_controllers
from falaj.records.scheduling.snapshot import Quota
from falaj.records.training.jobs import Job, JobState
from falaj.records.tuning import Study, StudyState, StudyTrial, TrialState
from falaj.training.tables import attempts
from platforms import make_platform
from polling import eventually

pytestmark = pytest.mark.slow

SPACE = {"x": {"low": -3.0, "high": 3.0}}
SCRIPT = """
import sys
import falaj as fj

x = float(sys.argv[1].partition("=")[2])
fj.job.log(step=1, score=-(x - 1) ** 2)
"""
TOML = """
[prices]
currency = "AED"
cpu_hour = 1.0
"""


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[ControllerProcesses]:
    with make_platform(tmp_path, toml=TOML) as platform, run_controllers(platform, tmp_path) as made:
        yield made


def tune(controllers: ControllerProcesses, script: str = SCRIPT, **options: Any) -> Study:
    folder = controllers.folder / "trials"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    given: dict[str, Any] = {"space": SPACE, "metric": "score", "seed": 5, **options}
    return controllers.platform.tune(folder / "train.py", **given)


def ended(controllers: ControllerProcesses, study: Study) -> Study:
    eventually(lambda: controllers.platform.studies.show(study.id).state.ended)
    return controllers.platform.studies.show(study.id)


def jobs_of(controllers: ControllerProcesses, study: Study) -> list[Job]:
    found = controllers.platform.jobs.list(limit=1000).items
    return [each for each in found if each.spec.experiment == study.name]


def test_a_quota_lets_parallel_trials_wait(controllers: ControllerProcesses) -> None:
    platform = controllers.platform
    platform.queues.set("lab", quota=Quota(cpus=1), limit=Quota(cpus=1))
    study = tune(controllers, trials=4, parallel=3, queue="lab")
    controllers.start_controller()

    found = ended(controllers, study)

    assert (found.state, found.counts) == (StudyState.DONE, {TrialState.COMPLETE: 4})
    rows = sorted(platform.rows(attempts), key=lambda row: row["started_at"])
    assert len(rows) == 4
    for earlier, later in pairwise(rows):
        assert earlier["ended_at"] <= later["started_at"]


def test_a_study_says_that_the_budget_is_spent_and_goes_on_when_it_is_raised(
    controllers: ControllerProcesses,
) -> None:
    """Each trial may run for an hour, which costs 1 AED: after the first, the rest of 1 AED does not cover another."""
    platform = controllers.platform
    platform.queues.set_budget("default", money=1.0)
    study = tune(controllers, trials=3, parallel=1, timeout="1h")
    controllers.start_controller()

    waiting = eventually(lambda: (found := platform.studies.show(study.id)).reason and found)
    shown = platform.workflows.show(str(waiting.work)).doing
    platform.queues.set_budget("default", money=100.0)
    found = ended(controllers, study)

    assert (waiting.state, waiting.counts[TrialState.COMPLETE]) == (StudyState.RUNNING, 1)
    assert "its trials wait: the budget of its workspace does not cover it" in waiting.reason
    assert "the budget of its workspace" in str(shown)
    assert (found.state, found.reason, found.counts) == (StudyState.DONE, None, {TrialState.COMPLETE: 3})
    assert len(jobs_of(controllers, study)) == 3


STEPS, HELD_AT = 12, 6
KINDS = ["good", "trained", "best", "bad"]
"""One trial each; with the seed of `tune` the grid is searched in this order."""
KINDS_SCRIPT = f"""
import os, select, signal, sys, time
import falaj as fj

kind = sys.argv[1].partition("=")[2]
if kind == "trained":
    import torch

    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    torch.set_num_threads(1)
    rows, done = torch.randn(64, 4), []

    def loss(out, target):
        done.append(1)
        if fj.job.attempt == 1:
            time.sleep(0.25)  # metrics are sent once a second
        if fj.job.attempt == 1 and len(done) == {HELD_AT}:
            select.select([wakeup], [], [])  # it must not end before it is stopped
        return torch.nn.functional.mse_loss(out, target)

    data = (rows, rows.sum(1, keepdim=True))
    options = dict(batch_size=8, checkpoint_every=1000, device="cpu", tune="off")
    fj.fit(torch.nn.Linear(4, 1), loss, data, steps={STEPS}, **options)
else:
    for step in range(1, 4):
        fj.job.log(step=step, loss={{"good": 100.0, "best": 0.0, "bad": 1e6}}[kind])
    if kind == "bad":
        fj.job.flush()
        time.sleep(600)  # until it is pruned
"""


@pytest.mark.parametrize("is_killed", [False, True], ids=["controller runs on", "controller is killed"])
def test_a_preempted_trial_is_saved_queued_again_resumed_and_counted_once(
    controllers: ControllerProcesses, is_killed: bool
) -> None:
    platform = controllers.platform
    platform.queues.set("lab", quota=Quota(cpus=1), limit=Quota(cpus=1))
    controller = controllers.start_controller()
    study = tune(
        controllers,
        KINDS_SCRIPT,
        space={"kind": KINDS},
        sampler="grid",
        metric="loss",
        pruner="median",
        startup_trials=1,
        parallel=2,
        max_failures=1,
        queue="lab",
        priority=-10,
    )
    before = eventually(lambda: trial_of(controllers, study, 1, TrialState.RUNNING))
    eventually(lambda: platform.jobs.show(str(before.job)).progress)

    urgent = controllers.submit("import time; time.sleep(600)", name="urgent", queue="lab", priority=10)
    if is_killed:
        eventually(lambda: platform.jobs.show(str(before.job)).leaving)
        controller.kill()
        controller.wait()
        controllers.start_controller()
    waiting = eventually(lambda: trial_of(controllers, study, 1, TrialState.QUEUED))
    eventually(lambda: controllers.state(urgent) is JobState.RUNNING)
    at_preemption = platform.studies.show(study.id)
    platform.jobs.cancel(urgent.id)
    found = ended(controllers, study)

    assert (waiting.params, waiting.job, waiting.run) == (before.params, before.job, before.run)
    assert (at_preemption.state, at_preemption.counts) == (
        StudyState.RUNNING,
        {TrialState.COMPLETE: 1, TrialState.QUEUED: 2},
    )
    trials = [*reversed(platform.studies.trials(study.id).items)]
    assert (found.state, found.reason) == (StudyState.DONE, None)
    assert [(each.params["kind"], each.state) for each in trials] == [
        ("good", TrialState.COMPLETE),
        ("trained", TrialState.COMPLETE),
        ("best", TrialState.COMPLETE),
        ("bad", TrialState.PRUNED),
    ]
    tries = {each.name: (each.attempt, each.preemptions) for each in jobs_of(controllers, study)}
    assert tries == {"train-0": (1, 0), "train-1": (2, 1), "train-2": (1, 0), "train-3": (1, 0)}
    job = platform.jobs.show(str(before.job))
    assert (job.state, job.run) == (JobState.DONE, before.run)
    assert f"resuming after step {HELD_AT}" in controllers.log(job)
    history = platform.runs.metrics(job.run, "loss").read_all().to_pydict()
    assert history["step"] == [*range(1, STEPS + 1)]
    assert [(each.step, each.value) for each in trials[1].reports] == [
        *zip(history["step"], history["value"], strict=True)
    ]
    params = {each.key: each.value for each in platform.runs.show(job.run).params}
    assert params["kind"] == "trained"


def trial_of(
    controllers: ControllerProcesses, study: Study, number: int, state: TrialState
) -> StudyTrial | None:
    """Return a trial if its job was submitted and it is in this state."""
    found = controllers.platform.studies.trials(study.id, state=state).items
    return next((each for each in found if each.number == number and each.job), None)
