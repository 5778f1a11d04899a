"""Training sets with a label, for the models of batch_runs.py."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from batch_runs import NAMES
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.sdk.platform import Platform

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def labelled(count: int) -> pa.Table:
    """Return customers of whom those with many calls leave, with some noise; a few have no label."""
    random = np.random.default_rng(7)
    values = {name: random.uniform(0, high, count) for name, high in zip(NAMES, (50, 11, 7), strict=True)}
    leaves = values["calls"] + random.normal(0, 1, count) > 3
    churned = pa.array(leaves.astype(np.int64), mask=np.arange(count) % 1000 == 999)
    keys = {"customer_id": np.arange(count), "event_time": pa.array([NOON] * count)}
    return pa.table({**keys, **values, "churned": churned})


def make_set(platform: Platform, rows: pa.Table, name: str = "holdout") -> str:
    """Make a training set that has the features and the label."""
    view = FeatureView(
        name="usage", entities=("customer",), columns=(Feature(name="minutes", type=ColumnType.FLOAT),)
    )
    entity = Entity(name="customer", key="customer_id", type=ColumnType.INTEGER)
    platform.features.apply(entities=(entity,), views=(view,))
    minutes = pa.array(np.ones(len(rows)))
    platform.ingest("usage", rows.select(["customer_id", "event_time"]).append_column("minutes", minutes))
    return platform.training_set(name, spine=rows, views=["usage"]).id
