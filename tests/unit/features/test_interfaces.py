"""Features over both interfaces: the same results in this process and over HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as csv
import pytest

from falaj.assembly.platform import local_caller
from falaj.errors import InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.features import (
    AggregateFunction,
    Aggregation,
    ChangeKind,
    ColumnType,
    Entity,
    Feature,
    FeatureView,
)
from interfaces import ServedPlatform, serve

NOTHING = [(None, None)] * 2
MOMENT = pa.timestamp("us", "UTC")
NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
DEFINED = (
    Entity(name="driver", key="driver", type=ColumnType.INTEGER),
    FeatureView(
        name="trips",
        entities=("driver",),
        columns=(Feature(name="km", type=ColumnType.FLOAT), Feature(name="car", type=ColumnType.TEXT)),
        ttl=DAY,
    ),
    FeatureView(
        name="sums",
        entities=("driver",),
        columns=(Feature(name="km", type=ColumnType.FLOAT),),
        aggregations=(
            Aggregation(name="km_2h", column="km", function=AggregateFunction.SUM, window=2 * HOUR),
        ),
    ),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPlatform]:
    with serve(tmp_path_factory.mktemp("features")) as made:
        made.clock.now = NOON + 3 * HOUR
        made.platform.apply(DEFINED)
        for view in ("trips", "sums"):
            made.platform.ingest(view, trips())
            made.platform.features.materialize(view)
        yield made


def trips() -> pa.Table:
    hours = [0, 1, 2, 0, 0, 0]
    return pa.table(
        {
            "driver": [1, 1, 1, 2, 4, 5],
            "event_time": pa.array([NOON + n * HOUR for n in hours], MOMENT),
            "km": [1.0, 2.0, 4.0, None, math.nan, math.inf],
            "car": ["red", "blue", None, "دبي", None, None],
        }
    )


@pytest.mark.slow
def test_online_reads_agree_on_both_interfaces_and_expire(served: ServedPlatform) -> None:
    near, far, keys = served.parts.services.features, served.platform.features, ("1", "2", "3", "4", "5")

    with acting_as(local_caller(served.parts.database)):
        here = [near.read(view, keys=keys) for view in ("trips", "sums")]
    there = [far.read(view, keys=keys) for view in ("trips", "sums")]

    assert here == there
    assert [row.values for row in there[0].rows] == [(4.0, None), (None, "دبي"), *NOTHING, (math.inf, None)]
    assert [row.values for row in there[1].rows] == [(6.0,), *[(None,)] * 3, (math.inf,)]
    served.clock.now = NOON + 2 * HOUR + DAY
    expired = [row.values for row in far.read("trips", keys=keys).rows]
    assert expired == [(4.0, None), (None, None), *NOTHING, (None, None)]
    served.clock.now = NOON + 3 * HOUR


@pytest.mark.slow
def test_online_values_are_not_stored_in_clear(served: ServedPlatform) -> None:
    files = [file for file in served.parts.home.path.rglob("*") if file.is_file() and "online" in str(file)]

    assert files
    assert all("دبي".encode() not in file.read_bytes() for file in files)


@pytest.mark.slow
def test_a_view_is_a_spine_over_a_span_of_time(served: ServedPlatform) -> None:
    made = served.platform.training_set(
        "span", spine="trips", views=["sums"], since=NOON + HOUR, until=NOON + 2 * HOUR
    )

    found = served.platform.features.load("span").read_all().to_pydict()
    assert found == {
        "driver": [1],
        "event_time": [NOON + HOUR],
        "km": [2.0],
        "car": ["blue"],
        "sums__km_2h": [3.0],
    }
    assert made.spine == served.platform.features.show("trips").id
    assert made.spine_pin is not None
    assert (made.spine_pin.table_version, made.since, made.until) == (0, NOON + HOUR, NOON + 2 * HOUR)
    newest = served.platform.training_set("newest", spine="trips", views=["sums"], last=HOUR)
    assert (newest.rows, newest.since, newest.until) == (2, NOON + HOUR, None)
    assert served.platform.training_set("all", spine="view:trips", views=["sums"]).rows == 6


def test_a_spine_comes_from_a_file_or_a_table_and_is_kept(served: ServedPlatform, tmp_path: Path) -> None:
    rows = pa.table({"driver": [2, 1], "event_time": pa.array([NOON, NOON], MOMENT), "label": [0, 1]})
    csv.write_csv(rows, tmp_path / "spine.csv")

    for name, spine in {
        "table": rows,
        "file": tmp_path / "spine.csv",
        "text": str(tmp_path / "spine.csv"),
    }.items():
        served.platform.training_set(name, spine=spine, views=["trips"])

    sets = [served.platform.features.load(name).read_all().to_pydict() for name in ("table", "file", "text")]
    assert sets[0]["trips__car"] == ["دبي", "red"]
    assert sets[0] == sets[1] == sets[2]
    kept = next(each for each in served.platform.features.training_sets().items if each.name == "table").spine
    assert served.platform.blobs.show(kept).committed


def test_a_plan_changes_nothing(served: ServedPlatform) -> None:
    longer = DEFINED[1].model_copy(update={"ttl": 2 * DAY})
    new = Entity(name="city", key="city")

    planned = served.platform.features.plan(entities=(DEFINED[0], new), views=(longer, DEFINED[2]))

    assert [(each.name, each.change, each.version) for each in planned] == [
        ("driver", ChangeKind.UNCHANGED, None),
        ("city", ChangeKind.NEW, None),
        ("trips", ChangeKind.CHANGED, 2),
        ("sums", ChangeKind.UNCHANGED, 1),
    ]
    assert planned[2].differences == ("ttl",)
    assert served.platform.features.show("trips").version == 1


@pytest.mark.parametrize(
    ("spine", "options", "error"),
    [
        ("none-such", {}, NotFound),
        ("trips", {"since": NOON, "until": NOON}, InvalidInput),
        ("trips", {"event_time": "km"}, InvalidInput),
        ("trips", {"since": NOON, "last": HOUR}, InvalidInput),
        (Path("none.csv"), {}, InvalidInput),
        (3, {}, InvalidInput),
    ],
)
def test_an_invalid_spine_is_refused(
    served: ServedPlatform, spine: object, options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        served.platform.training_set("wrong", spine=spine, views=["sums"], **options)

    assert "wrong" not in [each.name for each in served.platform.features.training_sets().items]
