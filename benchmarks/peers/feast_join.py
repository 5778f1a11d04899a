"""Feast's side of features_join: a training set by its duckdb offline store, in Feast's own virtualenv."""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
from feast import Entity, FeatureStore, FeatureView, Field, FileSource, RepoConfig
from feast.types import Float64
from feast.value_type import ValueType

VIEWS = ("trips", "fares")
FEATURES = [f"f{number}" for number in range(5)]
TTL = timedelta(days=30)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    store = open_store(folder)
    spine = pq.read_table(folder / "spine.parquet").to_pandas()
    wanted = [f"{view}:{feature}" for view in VIEWS for feature in FEATURES]
    before, started = cpu_seconds(), time.perf_counter()
    job = store.get_historical_features(
        entity_df=spine, features=wanted, full_feature_names=True, filter_by_created_timestamp=True
    )
    found = job.to_arrow()
    cost = {"cpu_s": cpu_seconds() - before, "wall_s": time.perf_counter() - started}
    peak = peak_mb()
    pq.write_table(found, folder / "feast.result.parquet")
    print(json.dumps(cost | {"peak_mb": peak}))


def open_store(folder: Path) -> FeatureStore:
    config = RepoConfig(
        project="bench",
        provider="local",
        registry=str(folder / "feast.registry.db"),
        offline_store={"type": "duckdb"},
        online_store={"type": "sqlite", "path": str(folder / "feast.online.db")},
        entity_key_serialization_version=3,
    )
    store = FeatureStore(config=config)
    driver = Entity(name="driver", join_keys=["driver"], value_type=ValueType.INT64)
    store.apply([driver, *(feature_view(folder, name, driver) for name in VIEWS)])
    return store


def feature_view(folder: Path, name: str, driver: Entity) -> FeatureView:
    source = FileSource(
        name=f"{name}_source",
        path=str(folder / f"{name}.parquet"),
        timestamp_field="event_timestamp",
        created_timestamp_column="created",
    )
    schema = [Field(name=feature, dtype=Float64) for feature in FEATURES]
    return FeatureView(name=name, entities=[driver], ttl=TTL, schema=schema, source=source)


def peak_mb() -> float:
    """Return the peak memory of this process; ru_maxrss would begin with that of its parent."""
    (line,) = [
        each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM")
    ]
    return int(line.split()[1]) / 1024


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
