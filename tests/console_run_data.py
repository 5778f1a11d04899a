"""Data for pages of the console: runs with curves and artifacts, an endpoint that answers, and a monitor of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

import falaj as fj
from falaj.errors import FalajError
from falaj.records.monitoring.monitors import Monitor, MonitorWindow
from falaj.records.monitoring.sketches import FalseAlarmBudget, RowDependence
from falaj.records.registry import TensorSpec
from falaj.records.serving.predictions import InferenceResult, InferInput
from falaj.records.serving.tensors import Datatype
from falaj.records.tracking import DatasetInput, MetricPoint
from model_servers import mlp
from polling import eventually

HOSTILE = "<script>window.harmed = 1</script>\"'`{{ 7 * 7 }} \u202eabc " + "x" * 150
"""A text of a stranger; it runs nothing, wherever it is shown."""
DRAWING = (
    b'<svg xmlns="http://www.w3.org/2000/svg" width="200" height="120" onload="window.harmed = 1">'
    b'<script>window.harmed = 1</script><circle cx="60" cy="60" r="40" fill="teal"/></svg>'
)
PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360f8cf5000000005"
    "0001a5f645400000000049454e44ae426082"
)
COLUMNS = ("distance", "wind", "hour")


def log_run(
    platform: fj.Platform, name: str, *, steps: int = 200, lr: float = 0.01, ends: bool = True
) -> str:
    """Log a run with curves, system metrics, parameters, tags, a dataset and artifacts; return its id."""
    tags = {"team": "vision", "git.commit": "0a1b2c3d4e5f", "hostile": HOSTILE}
    params = {"lr": lr, "batch": 64, "optimizer": "adamw" if lr < 0.05 else "sgd", "note": HOSTILE}
    run = platform.runs.start("vision", name=name, params=params, tags=tags).id
    noise = np.random.default_rng(len(name))
    points = [point for step in range(steps) for point in _points(step, lr, noise)]
    for begin in range(0, len(points), 5000):
        platform.runs.log_metrics(run, tuple(points[begin : begin + 5000]))
    used = DatasetInput(name="flights-2026", digest="ab12cd34", tags={"mlflow.data.context": "training"})
    platform.runs.log_inputs(run, datasets=(used,))
    for path, data in artifacts().items():
        platform.runs.upload_artifact(run, path, iter([data]))
    if ends:
        platform.runs.end(run)
    return run


def _points(step: int, lr: float, noise: np.random.Generator) -> list[MetricPoint]:
    loss = 2 * math.exp(-step * math.sqrt(lr) / 9)
    values = {
        "train/loss": loss + 0.1 * noise.random(),
        "val/loss": loss + 0.15 + 0.05 * noise.random(),
        "accuracy": 1 - 0.4 * loss - 0.02 * noise.random(),
        "system/cpu_utilization_percentage": 60 + 20 * noise.random(),
        "system/gpu_0_utilization_percentage": 80 + 15 * noise.random(),
        "system/system_memory_usage_megabytes": 8000.0 + step,
    }
    return [MetricPoint(key=key, value=value, step=step) for key, value in values.items()]


def artifacts() -> dict[str, bytes]:
    """Return files of the kinds that a page shows, some of which would harm it if they were run."""
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"n": [1, 2, 3], "text": ["a", HOSTILE, None]}), sink)
    return {
        "plots/roc.svg": DRAWING,
        "plots/dot.png": PICTURE,
        "plots/no.png": b"<script>window.harmed = 1</script>",
        "rows.csv": b"id,words\n1,<script>window.harmed = 1</script>\n2,plain\n",
        "rows.parquet": bytes(sink.getvalue()),
        "report.html": b"<script>window.harmed = 1</script><h1>report</h1>",
        "environment.txt": b"numpy==2.3.4\n",
        "weights.bin": b"\x00\x01",
    }


def serve(platform: fj.Platform, folder: Path, name: str, *, versions: int = 2) -> None:
    """Register versions of a model with three columns, serve the first, and wait until it answers."""
    for seed in range(versions):
        file = mlp(folder / f"{name}{seed}.onnx", widths=(3, 8, 1), seed=seed)
        blob = platform.blobs.upload(iter([file.read_bytes()]))
        platform.models.register(
            name,
            files=(blob.id,),
            paths=("model.onnx",),
            inputs=(TensorSpec(name="x", dtype="float32", shape=(-1, 3), features=COLUMNS),),
            outputs=(TensorSpec(name="y", dtype="float32", shape=(-1, 1)),),
        )
    platform.endpoints.deploy(name, model=f"{name}@1")
    eventually(lambda: _answers(platform, name))


def _answers(platform: fj.Platform, name: str) -> InferenceResult | None:
    try:
        return infer(platform, name, np.zeros((1, 3)))
    except FalajError:
        return None


def infer(platform: fj.Platform, name: str, rows: Any) -> InferenceResult:
    """Request predictions for rows of three columns."""
    data = [float(value) for value in np.asarray(rows).ravel()]
    given = InferInput(name="x", shape=(len(rows), 3), datatype=Datatype.FP32, data=data)
    return platform.endpoints.infer(name, inputs=(given,))


def watch(platform: fj.Platform, folder: Path, endpoint: str, *, rows: int = 200) -> Monitor:
    """Watch an endpoint for drift from a training set of 2,000 rows."""
    view = f"{endpoint}-facts"
    noise = np.random.default_rng(1)
    columns: Mapping[str, Any] = {name: noise.normal(size=2000) for name in COLUMNS}
    at = pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * 2000)
    table = pa.table({"flight": np.arange(2000), "event_time": at, **columns})
    entity = f"{endpoint}-flight"
    platform.apply(
        [
            fj.Entity(name=entity, key="flight"),
            fj.FeatureView(
                name=view,
                entities=(entity,),
                columns=tuple(fj.Feature(name=name, type="float") for name in COLUMNS),  # type: ignore[arg-type]
            ),
        ]
    )
    file = folder / f"{endpoint}.parquet"
    parquet.write_table(table, file)
    platform.ingest(view, file)
    platform.training_set(f"{endpoint}-train", spine=file, views=[view])
    budget = FalseAlarmBudget(dependence=RowDependence.NONE)
    return platform.monitoring.watch(
        endpoint,
        reference=f"{endpoint}-train",
        columns=COLUMNS,
        window=MonitorWindow(rows=rows),
        budget=budget,
    )
