"""Features, training sets, models and a pipeline on a platform, for tests of the console's pages about them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa

from falaj.records.control.pipelines import Pipeline
from falaj.records.features import (
    AggregateFunction,
    Aggregation,
    ColumnType,
    Entity,
    Feature,
    FeatureView,
    InvalidRows,
    StoredView,
    TrainingSet,
)
from falaj.records.models.facts import PackagePin, TrainingHardware
from falaj.records.registry import ModelVersion, TensorSpec
from falaj.records.training.jobs import JobSpec
from falaj.sdk.platform import Platform
from model_files import onnx

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
HOSTILE = "<img src=x onerror=alert(1)>"
HOSTILE_CARD = """# Approved by the board

<script>document.title = "owned"</script>
<img src=x onerror="document.title = 'owned'">
[click](javascript:document.title='owned') and ![picture](http://evil.example/spy.png)
<a href="javascript:alert(1)">here</a> **bold words**
"""
ROWS = 400


@dataclass(frozen=True)
class FeatureData:
    calls: StoredView
    training: TrainingSet


def make_features(platform: Platform, prefix: str) -> FeatureData:
    """Make the view PREFIX-calls with two versions and rows, and the training set PREFIX-training."""
    entity = Entity(name=f"{prefix}-customer", key="customer")
    columns = (
        Feature(name="minutes", type=ColumnType.FLOAT),
        Feature(name="plan", type=ColumnType.TEXT, classes=("personal",)),
    )
    view = FeatureView(name=f"{prefix}-calls", entities=(entity.name,), columns=columns)
    platform.apply([entity, view])
    more = (*columns, Feature(name="roaming", type=ColumnType.BOOLEAN))
    total = Aggregation(
        name="minutes_7d", column="minutes", function=AggregateFunction.SUM, window=timedelta(days=7)
    )
    platform.apply([entity, view.model_copy(update={"columns": more, "aggregations": (total,)})])
    platform.ingest(view.name, rows())
    training = platform.training_set(f"{prefix}-training", spine=f"view:{view.name}", views=[view.name])
    return FeatureData(platform.features.show(view.name), training)


def make_quarantine(platform: Platform, prefix: str) -> None:
    """Make the view PREFIX-visits with two quarantined batches, of three invalid rows and of one."""
    entity = Entity(name=f"{prefix}-customer", key="customer")
    view = FeatureView(
        name=f"{prefix}-visits",
        entities=(entity.name,),
        columns=(Feature(name="minutes", type=ColumnType.FLOAT, min=0, max=1440),),
        invalid_rows=InvalidRows.QUARANTINE,
        max_invalid_share=0.8,
    )
    platform.apply([entity, view])
    for minutes in (["12", "-4", HOSTILE, "30", "many", "1"], ["1", "5000"]):
        table = pa.table(
            {
                "customer": [f"c{number}" for number in range(len(minutes))],
                "event_time": [NOON + timedelta(hours=number) for number in range(len(minutes))],
                "minutes": minutes,
            }
        )
        platform.ingest(view.name, table)


def rows(count: int = ROWS) -> pa.Table:
    """Return calls of customers; some have no minutes, and a plan's name is hostile."""
    plans = ("small", "large", HOSTILE)
    return pa.table(
        {
            "customer": [f"c{number % 40}" for number in range(count)],
            "event_time": [NOON + timedelta(hours=number) for number in range(count)],
            "minutes": [None if number % 10 == 0 else float(number % 37) for number in range(count)],
            "plan": [plans[number % 7 % 3] for number in range(count)],
            "roaming": [number % 3 == 0 for number in range(count)],
        }
    )


def make_version(
    platform: Platform, name: str, *, auc: float, card: str = "", **more: object
) -> ModelVersion:
    """Register the next version of a model."""
    blob = platform.blobs.upload(iter([onnx()]))
    made: ModelVersion = platform.models.register(
        name,
        files=(blob.id,),
        paths=("model.onnx",),
        inputs=(TensorSpec(name="features", dtype="float32", shape=(-1, 2), features=("minutes", "plan")),),
        outputs=(TensorSpec(name="score", dtype="float32", shape=(-1,)),),
        metrics={"auc": auc, "log_loss": round(1 - auc, 4)},
        packages=(PackagePin(name="scikit-learn", version="1.9.0"),),
        hardware=TrainingHardware(machine="node-1", cpus=8),
        licence="Apache-2.0",
        card=card,
        **more,  # type: ignore[arg-type]
    )
    return made


def make_pipeline(platform: Platform, prefix: str, *, model: str, view: str) -> None:
    """Deploy the first version of a model as PREFIX-endpoint, and apply the pipeline PREFIX-weekly."""
    platform.endpoints.deploy(f"{prefix}-endpoint", model=f"{model}@1")
    platform.pipelines.apply(
        Pipeline(
            name=f"{prefix}-weekly",
            endpoint=f"{prefix}-endpoint",
            model=model,
            spine=view,
            views=(view,),
            window=timedelta(days=30),
            job=JobSpec(name="train", script="train.py"),
            on_drift=False,
        )
    )
