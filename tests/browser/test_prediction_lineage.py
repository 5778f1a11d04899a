"""From a prediction to its source, and the variants of a version, on a model that is served and optimized for real."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from consoles import RunningConsole
from falaj.errors import FalajError
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.registry import TensorSpec
from falaj.records.serving.predictions import InferInput
from polling import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

NAMES = ("wind", "rain", "traffic")
ROWS = 1500
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def delays(console: RunningConsole) -> str:
    """A trained model of trees, delays@1, with its view and training set; return the id of the training set."""
    from xgboost import XGBClassifier

    platform, random = console.platform, np.random.default_rng(7)
    features = random.normal(size=(ROWS, len(NAMES))).astype(np.float32)
    late = (features[:, 0] + features[:, 1] ** 2 + random.normal(size=ROWS) > 1).astype(np.int64)
    columns = tuple(Feature(name=name, type=ColumnType.FLOAT) for name in NAMES)
    view = FeatureView(
        name="bus-days",
        entities=("bus",),
        columns=(*columns, Feature(name="late", type=ColumnType.INTEGER)),
    )
    platform.apply([Entity(name="bus", key="bus", type=ColumnType.INTEGER), view])
    rows = {name: features[:, number].astype(np.float64) for number, name in enumerate(NAMES)}
    times = [NOON + timedelta(minutes=number) for number in range(ROWS)]
    platform.ingest("bus-days", pa.table({"bus": np.arange(ROWS), "event_time": times, "late": late, **rows}))
    data = platform.training_set("bus-june", spine="view:bus-days", views=["bus-days"])
    trained = XGBClassifier(n_estimators=60, max_depth=5, n_jobs=1).fit(features, late)
    blob = platform.blobs.upload(iter([bytes(trained.get_booster().save_raw("json"))]))
    platform.models.register(
        "delays",
        files=(blob.id,),
        paths=("model.json",),
        training_set=data.id,
        inputs=(TensorSpec(name="features", dtype="float32", shape=(-1, 3), features=NAMES),),
        metrics={"auc": 0.8},
    )
    return data.id


@pytest.mark.usefixtures("delays")
def test_a_prediction_leads_to_its_source(console: RunningConsole, page: Page) -> None:
    platform = console.platform
    platform.endpoints.deploy("delays", model="delays@1")
    given = (InferInput(name="features", shape=(1, 3), datatype="FP32", data=[0.5, 1.0, -1.0]),)

    def answered() -> str | None:
        try:
            return platform.endpoints.infer("delays", inputs=given).prediction
        except FalajError:
            return None

    def logged() -> bool:
        try:
            return platform.endpoints.prediction(prediction).model == "delays"
        except FalajError:
            return False

    prediction = str(eventually(answered))
    eventually(logged)

    page.goto(f"/w/default/lineage/{prediction}")
    page.get_by_role("heading", name="This prediction").wait_for()
    assert page.get_by_text("delays@1").first.is_visible()
    page.locator(".tree a", has_text="delays@1").click()
    page.wait_for_url("**/models/delays/versions/1")
    page.get_by_role("link", name="Lineage").click()
    page.locator(".tree a", has_text="bus-days").click()

    page.wait_for_url("**/features/bus-days")


def test_variants_are_plotted_by_latency_and_quality(
    console: RunningConsole, delays: str, page: Page
) -> None:
    platform = console.platform
    work = platform.optimization.start(
        "delays@1", data=delays, target="late", features=NAMES, recipes=("onnx", "int8")
    )
    eventually(lambda: platform.workflows.show(work.id).state.ended)
    assert platform.workflows.show(work.id).error is None

    page.goto("/w/default/models/delays/versions/1?tab=variants")

    page.locator(".chart canvas").wait_for()
    assert page.get_by_role("cell", name="original").first.is_visible()
