"""Pages of pipelines: states of steps, runs, approvals that wait."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from console_data import make_features, make_pipeline, make_version
from falaj.apps.console.components.states import BAD, BUSY, GOOD, IDLE, WAITING
from falaj.apps.console.pages.pipelines.catalogue import pipeline_list
from falaj.apps.console.pages.pipelines.pipeline import pipeline_view, read_records, started_work
from falaj.apps.console.pages.pipelines.steps import pipeline_steps
from falaj.apps.console.times import Times
from falaj.records.control.pipelines import Pipeline, PipelineOptimization
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.training.jobs import JobSpec
from platforms import OwnPlatform

TIMES = Times(UTC)
NOON = datetime(2026, 11, 17, 12, tzinfo=UTC)
PLAN = Pipeline(
    name="weekly",
    endpoint="churn",
    model="churn",
    spine="calls",
    views=("calls",),
    window=timedelta(days=30),
    job=JobSpec(name="train", script="train.py"),
    optimizing=PipelineOptimization(target="late"),
)
WAITS = "waits for approval: falaj models approve churn@2 --alias champion, by someone else"


def work(state: WorkflowState, **more: Any) -> WorkflowRun:
    fields = {"id": "work_1", "workspace": "workspace_1", "workflow": "pipelines.retrain", "created_at": NOON}
    return WorkflowRun(**fields | {"state": state} | more)


def tones(run: WorkflowRun | None) -> dict[str, str]:
    return {step.key: step.tone for step in pipeline_steps(PLAN, run)}


def test_a_pipeline_that_never_ran_has_no_state() -> None:
    assert {*tones(None).values()} == {IDLE}


@pytest.mark.parametrize(
    ("doing", "step", "busy"),
    [
        ("training set", 0, "data"),
        ("submit", 1, "train"),
        ("train: step 3 of 10", 2, "train"),
        ("register", 4, "register"),
        ("measure variants", 6, "optimize"),
        ("canary: 40 of 500 requests", 9, "canary"),
        ("rebase monitor_1", 13, "promote"),
    ],
)
def test_what_the_controller_does_is_the_step_that_runs(doing: str, step: int, busy: str) -> None:
    found = tones(work(WorkflowState.RUNNING, doing=doing, step=step))

    before, _, after = "".join(f"{key} " for key in found).partition(busy)
    assert found[busy] == BUSY
    assert {found[key] for key in before.split()} <= {GOOD}
    assert {found[key] for key in after.split()} <= {IDLE}


def test_a_run_that_waits_for_a_person_says_so() -> None:
    steps = pipeline_steps(PLAN, work(WorkflowState.RUNNING, doing=WAITS, step=10))

    (promote,) = [step for step in steps if step.key == "promote"]
    assert (promote.tone, promote.state) == (WAITING, "waits for approval")


def test_a_failed_run_shows_the_step_that_failed() -> None:
    found = tones(work(WorkflowState.FAILED, step=2, error="the job failed"))

    assert (found["data"], found["train"], found["register"]) == (GOOD, BAD, IDLE)


@pytest.mark.parametrize(
    ("outcome", "promoted", "canary", "promote"),
    [
        ("promote", True, GOOD, GOOD),
        ("roll_back", False, BAD, IDLE),
        ("undecided", False, WAITING, IDLE),
    ],
)
def test_the_verdict_colours_the_end(outcome: str, promoted: bool, canary: str, promote: str) -> None:
    result = {
        "verdict": {"outcome": outcome, "promote": promoted},
        "training_set": "dataset_1",
        "job": "job_1",
        "version": "version_1",
    }
    steps = {step.key: step for step in pipeline_steps(PLAN, work(WorkflowState.DONE, result=result))}

    assert (steps["canary"].tone, steps["promote"].tone) == (canary, promote)
    assert steps["data"].page == ("lineage", "dataset_1")
    assert steps["train"].page == ("jobs", "job_1")


@pytest.fixture
def ready(light_platform: OwnPlatform) -> OwnPlatform:
    make_features(light_platform, "churn")
    make_version(light_platform, "churn", auc=0.9)
    make_pipeline(light_platform, "churn", model="churn", view="churn-calls")
    return light_platform


def test_the_runs_of_a_pipeline_are_found_by_their_events(ready: OwnPlatform) -> None:
    first = ready.pipelines.start("churn-weekly")
    ready.sql(f"UPDATE control_work SET state = '{WorkflowState.CANCELLED}'")
    second = ready.pipelines.start("churn-weekly")
    make_other = ready.pipelines.show("churn-weekly").definition.model_copy(update={"name": "other"})
    ready.pipelines.apply(make_other)
    ready.pipelines.start("other")

    records = read_records(ready, "default", "churn-weekly")
    view = pipeline_view(records, times=TIMES)

    assert [run.id for run in view.runs] == [second.id, first.id]
    assert view.runs[0].by == "person, owner"
    assert view.runs[1].state == "cancelled"
    assert view.running == second.id
    assert view.versions == ("churn@1",)
    assert [row[1] for row in view.forecast].count("as good") == 3


def test_a_run_whose_event_is_gone_is_still_shown(ready: OwnPlatform) -> None:
    started = ready.pipelines.start("churn-weekly")

    assert started_work(ready.pipelines.show("churn-weekly"), []) == {started.id: None}


def test_the_list_names_state_triggers_and_approvals(ready: OwnPlatform) -> None:
    found = ready.pipelines.list().items
    run = work(WorkflowState.RUNNING, doing=WAITS)

    view = pipeline_list(
        [found[0].model_copy(update={"work": "work_1"})], {"work_1": run}, words="churn", times=TIMES
    )

    (row,) = view.rows
    assert (row.state, row.doing, row.triggers) == ("running", WAITS, "a person")
    assert view.waiting == (("churn@2", "champion"),)
    assert pipeline_list(found, {}, words="absent", times=TIMES).rows == ()
    assert pipeline_list(found, {}, words="", times=TIMES).rows[0].state == "never started"
