"""A study on a platform whose jobs the test runs itself, one function call each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from falaj.control.authorization import controller_caller
from falaj.control.tuning.search import StudySearch
from falaj.errors import Conflict
from falaj.governance.operations.caller import acting_as, on_terms
from falaj.records.scheduling.snapshot import Placement
from falaj.records.training.jobs import Job, JobSpec, JobState
from falaj.records.tuning import Study, StudyOutcome, StudySettings, StudyTrial
from job_harness import JobHarness, archive
from platforms import InternalAsController, OwnPlatform

SPACE = {
    "x": {"type": "float", "low": -2.0, "high": 2.0},
    "n": {"type": "int", "low": 1, "high": 4},
    "kind": {"type": "choice", "choices": ["a", "b"]},
}
Objective = Callable[[StudyTrial], Mapping[str, Any] | list[float] | str]
"""What the job of a trial does: logs metrics, logs a list of scores by step, or fails with a reason."""


class QuietSteps:
    """The part of a workflow's context that a search uses."""

    def __init__(self, workflow: str) -> None:
        self.workflow = workflow
        self.said: list[str] = []

    def report(self, words: str, *, done: int = 0, of: int | None = None) -> None:
        self.said.append(words)


class StudyEnv:
    """A platform, a study on it, and the jobs of its trials."""

    def __init__(self, platform: OwnPlatform, folder: Path) -> None:
        self.platform = platform
        self.harness = JobHarness(platform, folder)
        self.steps = QuietSteps("")
        self.ran: list[int] = []
        self._searches: list[StudySearch] = []
        self.harness.reconciler()  # its lease is that of the controller
        self._controller = controller_caller(platform.database)

    def create(self, name: str = "churn", **settings: Any) -> Study:
        given = {
            "space": SPACE,
            "objectives": [{"metric": "auc", "direction": "maximize"}],
            "trials": 6,
            "parallel": 2,
            "seed": 7,
            **settings,
        }
        code = self.platform.blobs.upload(iter([archive({"train.py": "print(1)"})]))
        return self.platform.studies.create(
            name,
            settings=StudySettings.model_validate(given),
            job=JobSpec(name=name, script="train.py"),
            code=code.id,
        )

    def search(self, study: Study) -> StudySearch:
        """Return a new search, as the next controller has one."""
        run = self.platform.runs.start(study.name, name="report")
        self.steps = QuietSteps(str(self.platform.studies.show(study.id).work))
        made = StudySearch(
            self.harness.services,
            self.steps,
            study.id,
            run=run.id,
            workspace=study.workspace,  # type: ignore[arg-type]
        )
        self._searches.append(made)
        return made

    def trials(self, study: Study) -> list[StudyTrial]:
        return [*reversed(self.platform.studies.trials(study.id, limit=1000).items)]

    def run_jobs(self, study: Study, objective: Objective) -> None:
        """Begin the jobs of all trials that have one, let them report, and end them."""
        for trial in self.trials(study):
            if trial.job is not None and self.harness.jobs.show(trial.job).state is JobState.QUEUED:
                self.begin(trial)
                found = objective(trial)
                self.end(trial, found)

    def begin(self, trial: StudyTrial, *, attempt: int = 1) -> None:
        with self._as_controller():
            self.harness.jobs.begin(
                str(trial.job), attempt=attempt, placements=(Placement(replica=0, node="here"),)
            )
        self.ran.append(trial.number)

    def preempt(self, trial: StudyTrial) -> None:
        """End the first attempt of a trial's job as one that made room for another job."""
        self._finish(
            self.harness.jobs.show(str(trial.job)), "preempted", reason="it made room for another job"
        )

    def end(
        self, trial: StudyTrial, found: Mapping[str, Any] | list[float] | str, *, attempt: int = 1
    ) -> None:
        job = self.harness.jobs.show(str(trial.job))
        if isinstance(found, str):
            self._finish(job, "failed", reason=found)
            return
        self.log(trial, found)
        self._finish(job, "done", attempt=attempt)

    def log(self, trial: StudyTrial, found: Mapping[str, Any] | list[float], *, after: int = 0) -> None:
        points = (
            [{"key": "auc", "value": value, "step": 10 * at} for at, value in enumerate(found, after + 1)]
            if isinstance(found, list)
            else [{"key": name, "value": value, "step": 1} for name, value in found.items()]
        )
        if points:
            self.platform.runs.log_metrics(str(trial.run), tuple(points))  # type: ignore[arg-type]

    def finish_cancelled(self, study: Study) -> None:
        """End the jobs that were asked to stop."""
        for trial in self.trials(study):
            with suppress(Conflict):
                if trial.job and self.harness.jobs.show(trial.job).cancelling:
                    self._finish(self.harness.jobs.show(trial.job), "cancelled", reason="stopped")

    def drive(self, study: Study, objective: Objective, *, most: int = 100) -> StudyOutcome:
        """Poll the study and run its jobs until it ends."""
        search = self.search(study)
        for _ in range(most):
            ended = search.poll()
            if ended is not None:
                return StudyOutcome.model_validate(ended)
            self.run_jobs(study, objective)
            self.finish_cancelled(study)
        raise AssertionError("the study does not end")

    def record(self, study: Study, outcome: StudyOutcome) -> Study:
        return InternalAsController(self.platform.studies, self.platform).record(study.id, outcome=outcome)

    def _finish(self, job: Job, verdict: Any, *, attempt: int = 1, **values: Any) -> None:
        with self._as_controller():
            self.harness.jobs.finish(job.id, attempt=attempt, verdict=verdict, **values)

    @contextmanager
    def _as_controller(self) -> Iterator[None]:
        with acting_as(self._controller), on_terms(fence=self.harness.fence):
            yield

    def close(self) -> None:
        for each in self._searches:
            each.close()


@pytest.fixture
def env(platform: OwnPlatform, tmp_path: Path) -> Iterator[StudyEnv]:
    """The test runs on SQLite and on PostgreSQL."""
    made = StudyEnv(platform, tmp_path)
    yield made
    made.close()


@pytest.fixture
def light_env(light_platform: OwnPlatform, tmp_path: Path) -> Iterator[StudyEnv]:
    """The same on SQLite only, for tests that do not depend on the database."""
    made = StudyEnv(light_platform, tmp_path)
    yield made
    made.close()


def quality(trial: StudyTrial) -> dict[str, float]:
    """An objective whose best is at x = 1, n = 2 and kind a."""
    params = trial.params
    return {"auc": -((float(params["x"]) - 1) ** 2) - abs(int(params["n"]) - 2) - (params["kind"] == "b")}
