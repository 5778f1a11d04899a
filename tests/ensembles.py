"""A Python step, a feature lookup and an ONNX model that together are an ensemble, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pyarrow as pa

from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.registry import ModelVersion, TensorSpec
from falaj.records.serving.ensembles import Ensemble
from falaj.sdk.platform import Platform
from model_servers import mlp

CLEAN = b"""
import numpy as np

def predict(inputs):
    amount = inputs["amount"]
    return {"scaled": np.stack([amount / 100, np.log1p(amount)], axis=1).astype(np.float32)}
"""
AMOUNT = TensorSpec(name="amount", dtype="float32", shape=(-1,))
SCALED = TensorSpec(name="scaled", dtype="float32", shape=(-1, 2))
CUSTOMERS = {"ann": (2.5, 3), "bob": (0.5, 7), "cat": (-1.0, 1)}
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def arrow(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def add_view(platform: Platform, **label: Any) -> None:
    """Make the view `customers` of three customers, with the features `mean` and `count`."""
    entity = Entity(name="customer", key="customer", type=ColumnType.TEXT)
    columns = (
        Feature(name="mean", type=ColumnType.FLOAT),
        Feature(name="count", type=ColumnType.INTEGER),
    )
    view = FeatureView(name="customers", entities=("customer",), columns=columns, event_time="at", **label)
    platform.features.apply(entities=(entity,), views=(view,))
    means, counts = zip(*CUSTOMERS.values(), strict=True)
    rows = pa.table(
        {
            "customer": list(CUSTOMERS),
            "at": pa.array([NOON - timedelta(days=1)] * 3, pa.timestamp("us", "UTC")),
            "mean": pa.array(means),
            "count": pa.array(counts, pa.int64()),
        }
    )
    platform.features.ingest("customers", data=platform.put("rows", arrow(rows)).id)
    platform.features.materialize("customers")


def register(platform: Platform, name: str, files: dict[str, bytes], **facts: Any) -> ModelVersion:
    blobs = tuple(platform.blobs.upload(iter([content])).id for content in files.values())
    return platform.models.register(name, files=blobs, paths=tuple(files), **facts)


def add_models(platform: Platform, folder: Path) -> Path:
    """Register clean@1, which is Python, and churn@1, which takes four numbers; return the file of the latter."""
    register(platform, "clean", {"model.py": CLEAN}, inputs=(AMOUNT,), outputs=(SCALED,))
    file = mlp(folder / "churn.onnx", widths=(4, 8, 1), seed=5)
    register(platform, "churn", {"model.onnx": file.read_bytes()})
    return file


def ensemble(**changes: Any) -> Ensemble:
    """Return the ensemble of clean@1, a lookup and churn@1."""
    lookup = {"views": [{"view": "customers"}], "features": ["mean", "count"], "missing": 0.0}
    whole = {
        "steps": [
            {"name": "clean", "model": "clean@1", "inputs": {"amount": "request.amount"}},
            {"name": "customer", "lookup": lookup, "inputs": {"customer": "request.customer"}},
            {
                "name": "score",
                "model": "churn@1",
                "inputs": {"x": ["clean.scaled", "customer.features"]},
            },
        ],
        "outputs": {"risk": "score.y", "scaled": "clean.scaled"},
    }
    return Ensemble.model_validate(whole | changes)


def expected(file: Path, amounts: Sequence[float], customers: Sequence[str]) -> Any:
    """Return what the ensemble answers, by the models without the platform."""
    amount = np.array(amounts, np.float32)
    scaled = np.stack([amount / 100, np.log1p(amount)], axis=1).astype(np.float32)
    found = np.array([CUSTOMERS.get(name, (0.0, 0)) for name in customers], np.float32)
    session = ort.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.concatenate([scaled, found], axis=1)})[0]


def request(amounts: Sequence[float], customers: Sequence[str]) -> dict[str, Any]:
    shape = [len(amounts)]
    return {
        "inputs": [
            {"name": "amount", "shape": shape, "datatype": "FP32", "data": list(amounts)},
            {"name": "customer", "shape": shape, "datatype": "BYTES", "data": list(customers)},
        ]
    }
