"""A new version of a view takes over the rows that fit it, and says what becomes of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from falaj.errors import Conflict, InvalidInput
from falaj.features.tables import views
from falaj.features.view_versions import apply as view_versions
from falaj.records.features import (
    AggregateFunction,
    Aggregation,
    ColumnType,
    Entity,
    Feature,
    FeatureView,
    KeepRows,
    PlannedChange,
)
from polling import PATIENCE_S

if TYPE_CHECKING:
    from conftest import FeaturesEnv

MOMENT = pa.timestamp("us", "UTC")
NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
DRIVER, RIDER = Entity(name="driver", key="driver"), Entity(name="rider", key="rider")
KM, TRIPS_MADE = Feature(name="km", type=ColumnType.FLOAT), Feature(name="n", type=ColumnType.INTEGER)
COLOUR = Feature(name="colour", type=ColumnType.TEXT)
TRIPS = FeatureView(name="trips", entities=("driver",), columns=(KM, TRIPS_MADE), event_time="at")
DAY = timedelta(days=1)


def changed(**fields: Any) -> FeatureView:
    return TRIPS.model_copy(update=fields)


def rows(*numbers: int, **columns: Any) -> pa.Table:
    return pa.table(
        {
            "driver": [f"d{number}" for number in numbers],
            "at": pa.array([NOON] * len(numbers), MOMENT),
            "km": [number / 2 for number in numbers],
            "n": pa.array(numbers, pa.int64()),
            **columns,
        }
    )


def apply(env: FeaturesEnv, view: FeatureView, **options: Any) -> PlannedChange:
    return env.features.apply(entities=(DRIVER, RIDER), views=(view,), **options).changes[-1]


HIDDEN = ("at", "__arrival", "__ingested")


def scanned(env: FeaturesEnv, version: int | None = None) -> list[dict[str, Any]]:
    found = env.features.scan("trips", version=version).read_all().sort_by("__arrival").to_pylist()
    return [{name: value for name, value in row.items() if name not in HIDDEN} for row in found]


@pytest.fixture
def stored(env: FeaturesEnv) -> FeaturesEnv:
    apply(env, TRIPS)
    env.features.ingest("trips", data=env.put("first", rows(1, 2)))
    return env


@pytest.fixture
def light(light_env: FeaturesEnv) -> FeaturesEnv:
    apply(light_env, TRIPS)
    light_env.features.ingest("trips", data=light_env.put("first", rows(1, 2)))
    return light_env


def test_a_new_column_is_null_in_the_rows_that_were_there(stored: FeaturesEnv) -> None:
    change = apply(stored, changed(columns=(KM, TRIPS_MADE, COLOUR)))
    stored.features.ingest("trips", data=stored.put("more", rows(3, colour=["red"])))

    assert (change.version, change.kept_rows) == (2, 2)
    assert change.notes == ("2 rows of version 1 kept", "colour is new, and null in them")
    assert scanned(stored) == [
        {"driver": "d1", "km": 0.5, "n": 1, "colour": None},
        {"driver": "d2", "km": 1.0, "n": 2, "colour": None},
        {"driver": "d3", "km": 1.5, "n": 3, "colour": "red"},
    ]
    assert [row["driver"] for row in scanned(stored, version=1)] == ["d1", "d2"]
    assert stored.features.show("trips").rows == 3
    assert stored.platform.verify_audit(deep=True).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ttl": DAY}, ()),
        ({"columns": (KM,)}, ("n is removed",)),
        ({"columns": (KM, Feature(name="n", type=ColumnType.FLOAT))}, ("n becomes float",)),
        (
            {"columns": (Feature(name="kilometres", type=ColumnType.FLOAT), TRIPS_MADE)},
            ("kilometres is new, and null in them", "km is removed"),
        ),
        (
            {
                "aggregations": (
                    Aggregation(name="s", column="n", function=AggregateFunction.SUM, window=DAY),
                )
            },
            (),
        ),
    ],
)
def test_rows_that_fit_are_kept(light: FeaturesEnv, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    planned = light.features.plan(entities=(DRIVER,), views=(changed(**fields),))[-1]
    change = apply(light, changed(**fields))

    assert change == planned
    assert change.notes == ("2 rows of version 1 kept", *words)
    assert [row["driver"] for row in scanned(light)] == ["d1", "d2"]
    light.features.materialize("trips")
    assert light.features.read("trips", keys=("d2",)).version == 2


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"columns": (KM, Feature(name="n", type=ColumnType.TEXT))}, "n was integer, and is text now"),
        ({"event_time": "happened"}, "event_time changed"),
        ({"created_time": "known"}, "created_time changed"),
        ({"entities": ("rider",)}, "the keys changed"),
        ({"sql": "SELECT * FROM source"}, "sql changed"),
    ],
)
def test_rows_that_do_not_fit_are_not_kept_and_that_is_said(
    light: FeaturesEnv, fields: dict[str, Any], word: str
) -> None:
    change = apply(light, changed(**fields))

    assert (change.version, change.kept_rows) == (2, 0)
    (note,) = change.notes
    assert note.startswith("2 rows of version 1 not kept: ")
    assert word in note
    assert "ingest them again" in note
    assert light.features.show("trips").table_version is None
    with pytest.raises(Conflict, match="no rows"):
        scanned(light)


def test_which_rows_are_kept_can_be_asked_for(light: FeaturesEnv) -> None:
    sql = "SELECT * REPLACE (2 * km AS km) FROM source"

    kept = apply(light, changed(sql=sql), keep_rows=KeepRows.ALL)
    none = apply(light, changed(sql=sql, ttl=DAY), keep_rows=KeepRows.NONE)

    assert kept.notes == ("2 rows of version 1 kept", "they were made by the earlier sql")
    assert none.notes == (
        "2 rows of version 2 not kept: as asked: ingest them again, or read the earlier version",
    )
    assert [row["km"] for row in scanned(light, version=2)] == [0.5, 1.0]
    assert light.features.ingest("trips", data="blob:first").added == 2
    assert [row["km"] for row in scanned(light)] == [1.0, 2.0]


def test_an_integer_that_is_no_float_is_refused_and_nothing_is_changed(light: FeaturesEnv) -> None:
    light.features.ingest("trips", data=light.put("large", rows(2**53 + 1)))

    with pytest.raises(InvalidInput) as refused:
        apply(light, changed(columns=(KM, Feature(name="n", type=ColumnType.FLOAT))))

    assert refused.value.faults[0].where == "view trips.n"
    assert light.features.show("trips").version == 1


@pytest.mark.slow
def test_an_upload_that_was_kept_is_not_added_again(light: FeaturesEnv) -> None:
    since = light.platform.clock.now
    light.platform.clock.advance(DAY)
    apply(light, changed(ttl=DAY))

    again = light.features.ingest("trips", data="blob:first")

    assert (again.version, again.added, again.already_since) == (2, 0, since)


@pytest.mark.slow
def test_a_view_that_was_not_changed_keeps_its_table(light: FeaturesEnv) -> None:
    change = apply(light, TRIPS)

    assert (change.version, change.kept_rows, change.notes) == (1, None, ())
    assert light.platform.count(views) == 1


@pytest.mark.slow
def test_rows_that_come_while_a_view_is_changed_are_in_the_new_version(
    stored: FeaturesEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, copy = stored.platform.again(), view_versions._copy_rows
    copying, go_on = threading.Event(), threading.Event()

    def copy_slowly(*args: Any) -> Any:
        found = copy(*args)
        copying.set()
        go_on.wait(PATIENCE_S)
        return found

    monkeypatch.setattr(view_versions, "_copy_rows", copy_slowly)
    blob = stored.put("more", rows(3))
    with ThreadPoolExecutor(2) as pool:
        change = pool.submit(apply, stored, changed(columns=(KM,)))
        assert copying.wait(PATIENCE_S)
        ingestion = pool.submit(other.features.ingest, "trips", data=blob)
        go_on.set()
        assert change.result(PATIENCE_S).kept_rows == 2
        done = ingestion.result(PATIENCE_S)

    assert (done.version, done.rows, done.notes) == (2, 3, ("n: not a column of the view, left out",))
    assert scanned(stored)[-1] == {"driver": "d3", "km": 1.5}
    assert [row["driver"] for row in scanned(stored, version=1)] == ["d1", "d2"]


@pytest.mark.slow
def test_rows_of_many_batches_are_kept(light: FeaturesEnv) -> None:
    count = 300_000
    many = pa.table(
        {
            "driver": [f"d{number}" for number in range(count)],
            "at": pa.array(np.arange(count), MOMENT),
            "km": np.arange(count, dtype=float),
            "n": np.arange(count),
        }
    )
    light.features.ingest("trips", data=light.put("many", many))

    change = apply(light, changed(columns=(KM, COLOUR, Feature(name="n", type=ColumnType.FLOAT))))

    found = light.features.scan("trips").read_all().sort_by("__arrival")
    assert change.kept_rows == count + 2 == found.num_rows
    assert found["n"].to_pylist() == [1.0, 2.0, *map(float, range(count))]
    assert found["colour"].null_count == count + 2
