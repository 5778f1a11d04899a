"""Pipelines: valid references, who may start them, and automatic triggers."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest

from falaj.control.authorization import controller_caller
from falaj.control.pipelines.triggers import RETRY, RetryTimes, start_due
from falaj.control.workflows.store import unfinished
from falaj.errors import Conflict, Denied, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.monitoring import store as monitoring
from falaj.records.control.pipelines import (
    Canary,
    CanaryOutcome,
    CanaryVerdict,
    MetricEvidence,
    Pipeline,
)
from falaj.records.control.workflows import WorkflowState
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role
from falaj.records.training.jobs import JobSpec
from model_files import onnx
from platforms import OwnPlatform

HOUR = timedelta(hours=1)


def plan(**more: Any) -> Pipeline:
    fields: dict[str, Any] = {
        "name": "weekly",
        "endpoint": "churn",
        "model": "churn",
        "spine": "facts",
        "views": ("facts",),
        "window": timedelta(days=30),
        "job": JobSpec(name="train", script="train.py"),
    }
    return Pipeline(**fields | more)


@pytest.fixture
def ready(platform: OwnPlatform) -> OwnPlatform:
    """A platform with a view, and an endpoint that serves version 1."""
    columns = (Feature(name="value", type=ColumnType.FLOAT),)
    view = FeatureView(name="facts", entities=("customer",), columns=columns)
    platform.apply([Entity(name="customer", key="customer"), view])
    blob = platform.blobs.upload(iter([onnx()]))
    platform.models.register("churn", files=(blob.id,), paths=("model.onnx",))
    platform.endpoints.deploy("churn", model="churn@1")
    return platform


@pytest.fixture
def alarmed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """When the open alerts of the endpoint were raised, as the test sets them."""
    raised: list[Any] = []
    monkeypatch.setattr(monitoring, "open_alert_times", lambda _tx, _endpoint: raised)
    return raised


def tick(platform: OwnPlatform) -> list[Any]:
    """Run one tick of the controller, and return the unfinished workflows after it."""
    with platform.database.read() as tx:
        fence = platform.parts.gate._fence(tx) if platform.parts.gate._fence else 0
    start_due(platform.parts.gate, platform.parts.services, fence=fence)
    with platform.database.read() as tx:
        return unfinished(tx)


def finish(platform: OwnPlatform) -> None:
    platform.sql(f"UPDATE control_work SET state = '{WorkflowState.DONE}'")


@pytest.mark.slow
def test_the_verdict_of_a_canary_is_told_to_who_is_responsible(ready: OwnPlatform) -> None:
    sara = ready.join("sara", Role.DEVELOPER)
    with acting_as(sara):
        work = ready.pipelines.canary("churn", model="churn@1")
    evidence = MetricEvidence(
        metric="score",
        compared=40,
        champion=0.5,
        challenger=0.5,
        margin=0.05,
        worse=1.0,
        worse_needed=300.0,
        within=2.0,
        within_needed=20.0,
        more=700,
    )
    words = "undecided, which says nothing against it: about 700 more labels would decide"
    verdict = CanaryVerdict(outcome=CanaryOutcome.UNDECIDED, promote=False, words=words, evidence=(evidence,))

    with acting_as(controller_caller(ready.database)):
        ready.pipelines.conclude("churn", model="churn@1", work=work.id, verdict=verdict)

    (told,) = ready.events.list(types=("pipelines.conclude",)).items
    expected = {"outcome": "undecided", "words": words, "model": "churn@1", "responsible": "sara"}
    assert told.data | expected | {"more": {"score": 700}} == told.data
    assert told.name == "churn"
    entry = ready.entries()[told.seq]
    assert (entry["action"], entry["outcome"], entry["verdict"]) == (
        "pipelines.conclude",
        "done",
        "undecided",
    )


def test_a_pipeline_is_applied_shown_and_changed(ready: OwnPlatform) -> None:
    made = ready.pipelines.apply(plan())
    changed = ready.pipelines.apply(plan(every=HOUR))

    assert changed.id == made.id
    assert ready.pipelines.show("weekly").definition == plan(every=HOUR)
    assert [each.definition.name for each in ready.pipelines.list().items] == ["weekly"]


@pytest.mark.slow
@pytest.mark.parametrize(("field", "kind"), [("endpoint", "endpoint"), ("spine", "view"), ("views", "view")])
def test_referenced_objects_must_exist(ready: OwnPlatform, field: str, kind: str) -> None:
    unknown: Any = ("nothing",) if field == "views" else "nothing"

    with pytest.raises(NotFound, match=f"there is no {kind} 'nothing'"):
        ready.pipelines.apply(plan(**{field: unknown}))

    assert ready.pipelines.list().items == ()


def test_it_is_started_once_at_a_time(ready: OwnPlatform) -> None:
    ready.pipelines.apply(plan())
    first = ready.pipelines.start("weekly")

    with pytest.raises(Conflict, match="at work already"):
        ready.pipelines.start("weekly")
    finish(ready)
    second = ready.pipelines.start("weekly")

    assert first.id != second.id
    assert (first.workflow, ready.pipelines.show("weekly").cause) == ("pipelines.retrain", "person")


@pytest.mark.slow
def test_a_viewer_may_not_start_it(ready: OwnPlatform) -> None:
    ready.pipelines.apply(plan())
    viewer = ready.join("vera", Role.VIEWER)

    with acting_as(viewer), pytest.raises(Denied):
        ready.pipelines.start("weekly")


def test_a_schedule_starts_it_when_its_time_has_come(ready: OwnPlatform, alarmed: list[Any]) -> None:
    ready.pipelines.apply(plan(every=HOUR))

    assert tick(ready) == []
    ready.clock.advance(HOUR)
    assert len(tick(ready)) == 1
    assert len(tick(ready)) == 1, "it is at work already"
    finish(ready)
    assert tick(ready) == [], "the next hour has only begun"
    assert ready.pipelines.show("weekly").cause == "schedule"


@pytest.mark.slow
def test_drift_starts_it_once_within_its_cooldown(ready: OwnPlatform, alarmed: list[Any]) -> None:
    ready.pipelines.apply(plan(rest=HOUR))
    assert tick(ready) == []

    alarmed.append(ready.clock())
    assert len(tick(ready)) == 1
    finish(ready)
    assert tick(ready) == [], "the same alert"
    ready.clock.advance(HOUR / 2)
    alarmed.append(ready.clock())
    assert tick(ready) == [], "it rests"
    ready.clock.advance(HOUR)
    assert len(tick(ready)) == 1
    assert ready.pipelines.show("weekly").cause == "drift"


def test_drift_starts_only_pipelines_with_that_trigger(ready: OwnPlatform, alarmed: list[Any]) -> None:
    ready.pipelines.apply(plan(on_drift=False))
    alarmed.append(ready.clock())

    assert tick(ready) == []


@pytest.mark.slow
def test_an_automatic_start_acts_for_the_user_who_applied_it_last(
    ready: OwnPlatform, alarmed: list[Any]
) -> None:
    ready.pipelines.apply(plan())
    dana = ready.join("dana", Role.DEVELOPER)
    with acting_as(dana):
        ready.pipelines.apply(plan(every=HOUR))
    ready.clock.advance(HOUR)

    (work,) = tick(ready)

    assert work.behalf == dana.id
    assert ready.pipelines.show("weekly").applied_by == "dana"


@pytest.mark.slow
def test_it_does_not_start_for_a_user_who_lost_their_role(ready: OwnPlatform, alarmed: list[Any]) -> None:
    dana = ready.join("dana", Role.DEVELOPER)
    with acting_as(dana):
        ready.pipelines.apply(plan(every=HOUR))
    ready.workspaces.revoke("default", "dana", role=Role.DEVELOPER)
    ready.clock.advance(HOUR)

    assert tick(ready) == []


@pytest.mark.slow
def test_it_does_not_start_for_a_disabled_user(ready: OwnPlatform, alarmed: list[Any]) -> None:
    with acting_as(ready.join("dana", Role.DEVELOPER)):
        ready.pipelines.apply(plan(every=HOUR))
    ready.users.disable("dana")
    ready.clock.advance(HOUR)

    assert tick(ready) == []
    assert "pipelines.start" not in [entry["action"] for entry in ready.entries()]


@pytest.mark.slow
def test_a_canary_is_work_on_an_endpoint(ready: OwnPlatform) -> None:
    work = ready.pipelines.canary("churn", model="churn@1", plan=Canary(share=20))

    with ready.database.read() as tx:
        (row,) = unfinished(tx)
    assert (work.workflow, row.input["canary"]["share"]) == ("pipelines.canary", 20)
    with pytest.raises(NotFound):
        ready.pipelines.canary("nothing", model="churn@1")


@pytest.mark.slow
@pytest.mark.parametrize("starts", [{"on_drift": True}, {"on_drift": False, "every": HOUR}])
def test_a_limited_token_applies_no_pipeline_with_a_trigger(
    ready: OwnPlatform, starts: dict[str, Any]
) -> None:
    """It would act with all the permissions of the token's owner."""
    limited = ready.tokens.issue(purpose="ci", actions=("pipelines.apply",))

    with acting_as(ready.caller_of(limited.secret)):
        with pytest.raises(Denied, match="more rights than this token has"):
            ready.pipelines.apply(plan(**starts))
        made = ready.pipelines.apply(plan(on_drift=False))

    assert made.definition.on_drift is False


@pytest.mark.slow
def test_a_pipeline_of_a_disabled_user_is_not_retried_every_second(
    ready: OwnPlatform, caplog: pytest.LogCaptureFixture
) -> None:
    dana = ready.join("dana", Role.DEVELOPER)
    with acting_as(dana):
        ready.pipelines.apply(plan(every=HOUR))
    ready.workspaces.revoke("default", "dana", role=Role.DEVELOPER)
    ready.clock.advance(2 * HOUR)
    retry_times: RetryTimes = {}
    caplog.set_level(logging.WARNING, "falaj.triggers")
    parts = ready.parts

    for _ in range(5):
        start_due(parts.gate, parts.services, fence=0, retry_times=retry_times)
        ready.clock.advance(timedelta(seconds=1))
    first = len(caplog.records)
    ready.clock.advance(RETRY)
    start_due(parts.gate, parts.services, fence=0, retry_times=retry_times)
    ready.clock.advance(-RETRY * 2)
    start_due(parts.gate, parts.services, fence=0, retry_times=retry_times)

    assert first == 1
    assert len(caplog.records) == 3, "tried again later, and where the clock was put back"
