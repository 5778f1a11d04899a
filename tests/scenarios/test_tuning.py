"""A study with real controllers, jobs and Optuna: killed in the middle, it goes on and repeats no finished trial."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import falaj as fj
from command_line import CommandLine, command_line
from controller_processes import ControllerProcesses, run_controllers
from falaj.records.training.jobs import JobState
from falaj.records.tuning import Study, StudyState, StudyTrial, TrialState
from platforms import make_platform
from polling import eventually

pytestmark = pytest.mark.slow

SCRIPT = """
import argparse
import falaj as fj

parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float, default=0.0)
parser.add_argument("--kind", default="a")
given = parser.parse_args()
for step in range(1, 4):
    fj.job.log(step=step, score=-(given.x - 1) ** 2 - (given.kind == "b") - 1 / step)
(fj.job.outputs / "ran.txt").write_text(str(given.x))
"""
SPACE = {"x": {"low": -3.0, "high": 3.0}, "kind": ["a", "b"]}


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[ControllerProcesses]:
    with make_platform(tmp_path) as platform, run_controllers(platform, tmp_path) as made:
        yield made


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys) as made:
        yield made


def write_script(folder: Path, text: str = SCRIPT) -> Path:
    (folder / "code").mkdir(exist_ok=True)
    (folder / "code" / "train.py").write_text(text)
    return folder / "code" / "train.py"


def ended_trials(platform: fj.Platform, study: Study) -> dict[int, StudyTrial]:
    return {each.number: each for each in platform.studies.trials(study.id).items if each.state.ended}


def test_after_kills_of_the_controller_no_finished_trial_is_repeated(
    controllers: ControllerProcesses, tmp_path: Path
) -> None:
    platform = controllers.platform
    study = platform.tune(write_script(tmp_path), space=SPACE, metric="score", trials=6, parallel=2, seed=5)
    seen: dict[int, StudyTrial] = {}

    for enough in (1, 2, 4):
        controller = controllers.start_controller()
        eventually(lambda: len(ended_trials(platform, study)) >= enough)  # noqa: B023
        controller.kill()  # SIGKILL
        controller.wait()
        seen |= ended_trials(platform, study)
    controllers.start_controller()
    eventually(lambda: platform.studies.show(study.id).state.ended)

    found = platform.studies.show(study.id)
    trials = ended_trials(platform, study)
    jobs = [each for each in platform.jobs.list(limit=1000).items if each.spec.experiment == study.name]
    assert (found.state, found.reason) == (StudyState.DONE, None)
    assert sorted(trials) == [0, 1, 2, 3, 4, 5]
    assert {each.state for each in trials.values()} == {TrialState.COMPLETE}
    assert {number: trials[number] for number in seen} == seen
    assert len(jobs) == 6
    assert {each.state for each in jobs} == {JobState.DONE}
    artifacts = {each.path: each.blob for each in platform.runs.show(str(found.run)).artifacts}
    data = json.loads(platform.get(artifacts["study.json"]))
    assert [each["number"] for each in data["trials"]] == [*range(6)]
    assert platform.get(artifacts["report.html"]).count(b"<polyline") == 6


MODEL = """
import argparse
import numpy as np
from sklearn.linear_model import LogisticRegression
import falaj as fj

parser = argparse.ArgumentParser()
parser.add_argument("--c", type=float, default=1.0)
given = parser.parse_args()
random = np.random.default_rng(0)
rows = random.normal(size=(200, 3)).astype(np.float32)
labels = (rows[:, 0] > 0).astype(int)
model = LogisticRegression(C=given.c).fit(rows, labels)
fj.job.log(step=1, accuracy=model.score(rows, labels) - abs(given.c - 1) / 1000)
fj.save_model(model, sample=rows[:20], names=("a", "b", "c"), metrics={"c": given.c})
"""


def test_the_best_trial_is_registered_on_request(tmp_path: Path) -> None:
    script = write_script(tmp_path, MODEL)

    with fj.open(tmp_path / "home") as platform:
        study = platform.tune(
            script, space={"c": [0.01, 1.0]}, metric="accuracy", sampler="grid", parallel=2, register="churn"
        )
        *_, ended = platform.studies.watch(study.id)

        assert (ended.state, ended.reason, ended.version) == (StudyState.DONE, None, "churn@1")
        made = platform.models.version("churn@1")
        assert made.metrics["c"] == ended.best[0].params["c"]
        assert made.run == ended.best[0].run


def test_cancelling_its_workflow_stops_a_study_and_its_jobs(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import time\ntime.sleep(600)\n")

    with fj.open(tmp_path / "home") as platform:
        study = platform.tune(script, space=SPACE, metric="score", trials=4, parallel=2)
        eventually(lambda: platform.studies.show(study.id).counts.get(TrialState.RUNNING) == 2)
        platform.workflows.cancel(str(study.work))
        *_, ended = platform.studies.watch(study.id)
        for job in platform.jobs.list().items:
            *_, stopped = platform.jobs.wait(job.id)
            assert stopped.state is JobState.CANCELLED

        assert (ended.state, ended.reason) == (StudyState.STOPPED, "its workflow was cancelled")
        assert ended.counts == {TrialState.CANCELLED: 2}


def test_the_command_line_searches_and_shows_what_it_found(cli: CommandLine, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    (tmp_path / "space.toml").write_text('x = {low = -3.0, high = 3.0}\nkind = ["a", "b"]\n')
    asked = ("--space", tmp_path / "space.toml", "--metric", "score", "--trials", "4", "--parallel", "2")

    ran = cli.done("tune", script, *asked, "--seed", "1", "--name", "quick")

    assert "study quick: maximize score, 4 trials" in ran.out
    assert "study quick is done; 4 complete" in ran.out
    assert ran.err.count(" complete: ") == 4
    assert [each["number"] for each in cli.done("studies", "trials", "quick", "--json").json["items"]] == [
        3,
        2,
        1,
        0,
    ]
    assert cli.done("studies", "best", "quick", "--json").json[0]["state"] == "complete"
    assert "importance" in cli.done("studies", "importance", "quick").out
    again = cli("tune", script, *asked, "--name", "quick")
    assert (again.status, "there is a study quick already" in again.err) == (1, True)
    refused = cli("tune", script, *asked, "--sampler", "grid")
    assert (refused.status, "a grid needs a step for x" in refused.err) == (2, True)
