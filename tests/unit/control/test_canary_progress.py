"""The progress of a canary: the evidence that its workflow judges, after each observation, and its last verdict."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from falaj.assembly.model_server import service_caller
from falaj.control.tables import work
from falaj.errors import NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.control.pipelines import Canary, CanaryOutcome
from falaj.records.control.workflows import WorkflowState
from falaj.records.governance.identity import Role
from falaj.records.serving.endpoints import Route
from falaj.records.serving.statistics import VersionCounts
from falaj.serving.service import MODEL_SERVER
from model_files import onnx
from platforms import OwnPlatform

PLAN = Canary(share=50, requests=100, labels=0, latency=1.0)
"""Only error rates are judged."""


@pytest.fixture
def divided(light_platform: OwnPlatform) -> OwnPlatform:
    """A platform with an endpoint that divides its requests between two versions."""
    for number in (1, 2):
        blob = light_platform.blobs.upload(iter([onnx(more=bytes([0x1A, 1, 48 + number]))]))
        light_platform.models.register("churn", files=(blob.id,), paths=("model.onnx",))
    light_platform.endpoints.deploy("churn", model="churn@1")
    return light_platform


def split(platform: OwnPlatform) -> None:
    routes = (Route(version="1", weight=50), Route(version="2", weight=50))
    platform.endpoints.route("churn", routes=routes)


def observe(platform: OwnPlatform, *, errors: tuple[int, int], requests: int = 100) -> None:
    counts = tuple(
        VersionCounts(version=version, requests=requests, errors=failed, latency=(0, 0, 0, 0, requests))
        for version, failed in zip(("1", "2"), errors, strict=True)
    )
    with acting_as(service_caller(platform.parts.gate, MODEL_SERVER, Role.OPERATOR)):
        platform.parts.services.endpoints.report("churn", counts=counts)


def test_an_endpoint_without_a_canary_has_no_progress(divided: OwnPlatform) -> None:
    with pytest.raises(NotFound, match="churn has one version"):
        divided.pipelines.canary_progress("churn")


def test_evidence_grows_with_each_observation_and_is_judged_by_the_plan_of_the_canary(
    divided: OwnPlatform,
) -> None:
    requested = divided.pipelines.canary("churn", model="churn@2", plan=PLAN)
    split(divided)
    for _ in range(3):
        observe(divided, errors=(1, 30))

    first = divided.pipelines.canary_progress("churn")
    for _ in range(5):
        observe(divided, errors=(1, 30))
    found = divided.pipelines.canary_progress("churn")

    assert (found.work, found.plan, found.champion, found.challenger) == (requested.id, PLAN, "1", "2")
    assert [each.number for each in first.points] == [1, 2, 3]
    assert [each.number for each in found.points] == [*range(1, 9)]
    assert found.points[:3] == first.points
    assert found.outcome is CanaryOutcome.ROLL_BACK
    (last,) = found.points[-1].metrics
    assert (last.metric, last.challenger, last.champion) == ("error_rate", 0.3, 0.01)
    assert last.worse > last.worse_needed
    assert last.low is not None
    assert last.high is not None
    assert 0 < last.low < 0.29 < last.high < 1


def test_versions_that_someone_split_are_compared_without_a_canary(divided: OwnPlatform) -> None:
    split(divided)
    observe(divided, errors=(1, 1))

    found = divided.pipelines.canary_progress("churn")

    assert (found.work, found.outcome, found.ended) == (None, CanaryOutcome.UNDECIDED, None)


def test_the_last_verdict_stays_when_the_canary_is_over(divided: OwnPlatform) -> None:
    requested = divided.pipelines.canary("churn", model="churn@2", plan=PLAN)
    verdict = {"outcome": "roll_back", "promote": False, "words": "it is worse: error rate"}
    with divided.database.write() as tx:
        ended = {"state": WorkflowState.DONE, "result": {"verdict": verdict}}
        tx.execute(update(work).where(work.c.id == requested.id).values(**ended))

    found = divided.pipelines.canary_progress("churn")

    assert found.ended is not None
    assert (found.ended.outcome, found.points) == (CanaryOutcome.ROLL_BACK, ())


def test_points_of_a_long_canary_are_thinned(divided: OwnPlatform) -> None:
    split(divided)
    for _ in range(450):
        observe(divided, errors=(0, 0), requests=2)

    found = divided.pipelines.canary_progress("churn")

    assert 200 <= len(found.points) <= 401
    assert found.points[-1].number == 450
