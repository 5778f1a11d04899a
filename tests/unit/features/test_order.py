"""Rows come back in the order of the spine, or of their arrival, however many there are."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.dataset as datasets
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.features import arrow_tables
from falaj.features.joins import ARRIVAL
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from interfaces import ServedPlatform, serve

if TYPE_CHECKING:
    from conftest import FeaturesEnv

MOMENT = pa.timestamp("us", "UTC")
NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
MANY = 300_000
"""Above 122,880 rows the table store writes in several threads, and batches overtake each other."""
DEFINED = (
    Entity(name="driver", key="driver", type=ColumnType.INTEGER),
    FeatureView(
        name="trips",
        entities=("driver",),
        columns=(Feature(name="km", type=ColumnType.FLOAT),),
        event_time="at",
    ),
)


def rows_of(count: int, **columns: pa.Array) -> pa.Table:
    moments = pa.array([NOON] * count, MOMENT)
    return pa.table({"driver": pa.arange(0, count), "at": moments, **columns})


def numbers_of(stream: pa.RecordBatchReader, column: str) -> pa.Array:
    return stream.read_all()[column].combine_chunks()


@settings(max_examples=30)
@given(
    runs=st.lists(st.integers(1, 7), max_size=12),
    files=st.integers(1, 4),
    group=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_rows_are_sorted_however_the_store_wrote_them(
    tmp_path_factory: pytest.TempPathFactory, runs: list[int], files: int, group: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    starts = [sum(runs[:position]) for position in range(len(runs))]
    written = [range(start, start + length) for start, length in zip(starts, runs, strict=True)]
    random.Random(seed).shuffle(written)
    for number in range(files):
        ints = pa.array([each for run in written[number::files] for each in run], pa.int64())
        pq.write_table(pa.table({"n": ints, "x": ints}), folder / f"{number}.parquet", row_group_size=group)

    found = arrow_tables.stream_in_order(datasets.dataset(folder, format="parquet"), "n", ["x"])

    assert found.read_all().to_pydict() == {"x": list(range(sum(runs)))}


def test_a_table_without_row_numbers_is_read_as_it_is_stored(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [3, 1, 2]}), tmp_path / "rows.parquet")

    found = arrow_tables.stream_in_order(datasets.dataset(tmp_path, format="parquet"), "n", ["x"])

    assert found.read_all().to_pydict() == {"x": [3, 1, 2]}


@pytest.mark.slow
def test_a_large_training_set_keeps_the_order_of_its_spine(light_env: FeaturesEnv) -> None:
    features = light_env.features
    features.apply(entities=DEFINED[:1], views=DEFINED[1:])
    km = pa.arange(0, MANY).cast(pa.float64())
    features.ingest("trips", data=light_env.put("rows", rows_of(MANY, km=km)))

    made = features.training_set("many", spine="view:trips", views=("trips",), since=NOON)

    found = features.load("many").read_all()
    assert made.columns == ("driver", "at", "km", "trips__km") == tuple(found.column_names)
    assert found["driver"].combine_chunks().equals(pa.arange(0, MANY))
    assert found["trips__km"].combine_chunks().equals(km)
    assert numbers_of(features.scan("trips"), ARRIVAL).equals(pa.arange(0, MANY))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedPlatform:
    with serve(tmp_path_factory.mktemp("order")) as made:
        yield made


@pytest.mark.slow
def test_a_million_rows_keep_their_order_over_rest_and_in_a_job(
    served: ServedPlatform, tmp_path: Path
) -> None:
    from falaj.control.jobs.staging import _write_parquet

    count, platform = 1_000_000, served.platform
    platform.apply(DEFINED)
    platform.ingest("trips", rows_of(count, km=pa.arange(0, count).cast(pa.float64())))
    order = pa.array(random.Random(1).sample(range(count), count))
    spine = pa.table({"driver": order, "event_time": pa.array([NOON + timedelta(1)] * count, MOMENT)})

    platform.training_set("many", spine=spine, views=["trips"], until=NOON + timedelta(2))

    found = platform.features.load("many").read_all()
    assert found["driver"].combine_chunks().equals(order)
    assert found["trips__km"].combine_chunks().equals(order.cast(pa.float64()))
    assert numbers_of(platform.features.scan("trips"), "driver").equals(pa.arange(0, count))
    _write_parquet(platform.features.load("many"), tmp_path / "training.parquet")  # what a job reads
    assert pq.read_table(tmp_path / "training.parquet")["driver"].combine_chunks().equals(order)
