"""Rows that break rules of their view: refused with all faults, or set aside, shown, ingested later and discarded."""

from __future__ import annotations

import io
import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from falaj.errors import Conflict, Denied, InvalidInput, KeyUnavailable, NotFound
from falaj.features.validation.checks import BROKEN, ROW, RowRules, check_rows
from falaj.governance.operations.caller import acting_as, on_terms
from falaj.records.features import ColumnType, Entity, Feature, FeatureView, InvalidRows, KeepRows, RowRule
from falaj.records.governance.identity import Role

if TYPE_CHECKING:
    from conftest import FeaturesEnv

MOMENT = pa.timestamp("us", "UTC")
NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
DRIVER = Entity(name="driver", key="driver", type=ColumnType.INTEGER)
KM = Feature(name="km", type=ColumnType.FLOAT, min=0, max=100)
CAR = Feature(name="car", type=ColumnType.TEXT, allowed=("red", "blue"))
TRIPS = FeatureView(
    name="trips",
    entities=("driver",),
    columns=(KM, CAR),
    invalid_rows=InvalidRows.QUARANTINE,
    max_invalid_share=0.5,
)


def changed(**fields: Any) -> FeatureView:
    return TRIPS.model_copy(update=fields)


def trips(*kms: object, start: int = 0, cars: str = "red", kind: pa.DataType | None = None) -> pa.Table:
    numbers = range(start, start + len(kms))
    return pa.table(
        {
            "driver": pa.array(numbers, pa.int64()),
            "event_time": pa.array([NOON + n * HOUR for n in numbers], MOMENT),
            "km": pa.array(kms, kind),
            "car": [cars] * len(kms),
        }
    )


def stored(env: FeaturesEnv) -> list[float | None]:
    found: list[float | None] = env.features.scan("trips").read_all()["km"].to_pylist()
    return found


# -------------------------------------------------------------------------------------------- life of a batch


def test_invalid_rows_are_set_aside_and_the_others_are_added(env: FeaturesEnv) -> None:
    env.features.apply(entities=(DRIVER,), views=(TRIPS,))

    done = env.features.ingest("trips", data=env.put("first", trips(1.0, -1.0, 2.0, 300.0)))

    assert (done.added, done.rows, done.quarantined, done.batch) == (2, 2, 2, "trips-1")
    assert {(each.rule, each.column, each.rows) for each in done.rules} == {
        ("min", "km", 1),
        ("max", "km", 1),
    }
    assert stored(env) == [1.0, 2.0]
    (batch,) = env.features.quarantined_batches("trips").items
    assert (batch.rows, batch.quarantined, batch.version, batch.file) == (2, 2, 1, "first")
    assert batch.rules == done.rules
    page = env.features.quarantined_rows("trips-1")
    assert page.columns == ("driver", "event_time", "km", "car")
    assert [(row.row, row.values[2]) for row in page.items] == [(2, "-1.0"), (4, "300.0")]
    assert [(row.broken[0].rule, row.broken[0].value) for row in page.items] == [
        (RowRule.MIN, "-1.0"),
        (RowRule.MAX, "300.0"),
    ]


def test_the_same_file_is_neither_added_nor_quarantined_twice(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    rows = trips(1.0, -1.0, 2.0)
    first = light_env.features.ingest("trips", data=light_env.put("one", rows))

    again = light_env.features.ingest("trips", data=light_env.put("two", rows))

    assert first.batch == "trips-1"
    assert (again.added, again.quarantined, again.already_since is None) == (0, 0, False)
    assert len(light_env.features.quarantined_batches("trips").items) == 1
    assert (
        light_env.features.ingest("trips", data=light_env.put("three", rows), again=True).batch == "trips-2"
    )
    assert [each.name for each in light_env.features.quarantined_batches("trips").items] == [
        "trips-2",
        "trips-1",
    ]


def test_rows_that_a_new_definition_allows_are_ingested_and_the_others_stay(env: FeaturesEnv) -> None:
    env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    env.features.ingest("trips", data=env.put("first", trips(1.0, 150.0, -1.0, 2.0, 170.0, 3.0)))
    assert env.features.ingest_quarantined("trips-1").added == 0  # the rules are as they were
    env.features.apply(views=(changed(columns=(KM.model_copy(update={"max": 200}), CAR)),))

    done = env.features.ingest_quarantined("trips-1")

    assert (done.version, done.added, done.rows, done.quarantined) == (2, 2, 5, 1)
    assert stored(env) == [1.0, 2.0, 3.0, 150.0, 170.0]
    (batch,) = env.features.quarantined_batches("trips").items
    assert (batch.rows, batch.ingested, batch.discarded, batch.quarantined) == (1, 2, 0, 3)
    assert [(each.rule, each.rows) for each in batch.rules] == [("min", 1)]
    (left,) = env.features.quarantined_rows("trips-1").items
    assert (left.row, left.values[2]) == (3, "-1.0")


def test_discarded_rows_are_gone_and_stay_counted(env: FeaturesEnv) -> None:
    env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    env.features.ingest("trips", data=env.put("first", trips(1.0, -1.0)))
    before = kept_bytes(env)

    gone = env.features.discard_quarantined("trips-1")

    assert gone.discarded == 1
    (batch,) = env.features.quarantined_batches("trips").items
    assert (batch.rows, batch.discarded, len(batch.rules)) == (0, 1, 1)
    acts = env.features.discard_quarantined, env.features.ingest_quarantined, env.features.quarantined_rows
    for act in acts:
        with pytest.raises(Conflict, match="no rows are left in trips-1"):
            act("trips-1")
        with pytest.raises(NotFound, match="trips-2"):
            act("trips-2")
    env.platform.clock.advance(timedelta(days=3))
    env.platform.blobs.cleanup()
    assert kept_bytes(env) == before - 1
    assert env.platform.audit.verify(deep=True)


def kept_bytes(env: FeaturesEnv) -> int:
    return sum(1 for store in env.features.backends.blobs.values() for _ in store.list())


def test_a_repeated_call_gets_its_first_answer(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    light_env.features.ingest("trips", data=light_env.put("first", trips(1.0, 150.0, -1.0, 2.0)))
    light_env.features.apply(views=(changed(columns=(KM.model_copy(update={"max": None}), CAR)),))

    with on_terms(key="once"):
        first = light_env.features.ingest_quarantined("trips-1")
    with on_terms(key="once"):
        again = light_env.features.ingest_quarantined("trips-1")
    with on_terms(key="gone"):
        gone = light_env.features.discard_quarantined("trips-1")
    with on_terms(key="gone"):
        assert light_env.features.discard_quarantined("trips-1") == gone
    with on_terms(key="once"):
        assert light_env.features.ingest_quarantined("trips-1") == first  # although no rows are left

    assert again == first
    assert len(stored(light_env)) == 3


# ------------------------------------------------------------------------------------------------- rules


def rules(*columns: Feature, **options: Any) -> RowRules:
    return RowRules(columns=columns, **{"invalid_rows": InvalidRows.QUARANTINE, **options})


def broken(table: pa.Table, *columns: Feature, **options: Any) -> dict[int, set[tuple[str, str]]]:
    """Return the rules that each invalid row breaks, by its number."""
    found = check_rows(table, rules(*columns, **options), where="view trips")
    if found.invalid is None:
        return {}
    assert found.rows.num_rows + found.invalid.num_rows == table.num_rows
    lists = zip(found.invalid[ROW].to_pylist(), found.invalid[BROKEN].to_pylist(), strict=True)
    return {row: {(each["rule"], each["column"]) for each in some} for row, some in lists}


INTEGER = Feature(name="n", type=ColumnType.INTEGER)
FLOAT = Feature(name="n", type=ColumnType.FLOAT)
BOOLEAN = Feature(name="n", type=ColumnType.BOOLEAN)
TIME = Feature(name="n", type=ColumnType.MOMENT)
TEXT = Feature(name="n", type=ColumnType.TEXT)
WRONG: dict[str, tuple[Feature, pa.Array, set[int]]] = {
    "texts that are no integers": (
        INTEGER,
        pa.array(["1", "x", None, "1.5", "-7", "9" * 30, ""]),
        {2, 4, 6, 7},
    ),
    "texts that are no floats": (FLOAT, pa.array(["1", "x", "1e5", "nan", "inf", "1.2.3", "--1"]), {2, 6, 7}),
    "texts that are no booleans": (BOOLEAN, pa.array(["true", "maybe", "0", "FALSE", "2"]), {2, 5}),
    "texts that are no times": (
        TIME,
        pa.array(["2024-06-01T08:00:00Z", "2024-02-31T08:00:00Z", "yesterday", "0000-06-01T08:00:00Z"]),
        {2, 3, 4},
    ),
    "large texts": (INTEGER, pa.array(["1", "x"], pa.large_string()), {2}),
    "fractions": (INTEGER, pa.array([1.0, 1.5, math.nan, math.inf, 1e30, -2.0]), {2, 4, 5}),
    "half fractions": (INTEGER, pa.array([1.0, 1.5], pa.float16()), {2}),
    "large numbers": (INTEGER, pa.array([1, 2**64 - 1], pa.uint64()), {2}),
    "inexact floats": (FLOAT, pa.array([1, 2**62 + 1]), {2}),
    "years that no reader has": (TIME, pa.array([0, 300_000_000_000], pa.timestamp("s", "UTC")), {2}),
    "bytes": (TEXT, pa.array([b"good", b"\xff\xfe"]), {2}),
}


@pytest.mark.parametrize(("column", "values", "bad"), WRONG.values(), ids=WRONG)
def test_values_that_cannot_be_converted_are_found(column: Feature, values: pa.Array, bad: set[int]) -> None:
    table = pa.table({"n": values})

    assert broken(table, column) == {row: {("type", "n")} for row in bad}
    with pytest.raises(InvalidInput, match=r"view trips\.n"):
        check_rows(table, rules(column, invalid_rows=InvalidRows.REFUSE), where="view trips")


def test_a_column_that_cannot_be_converted_at_all_refuses_the_file() -> None:
    for values in (pa.array([[1], [2]]), pa.array([1, 2])):
        with pytest.raises(InvalidInput, match="cannot be cast"):
            broken(pa.table({"n": values}), TIME)
    for table in (pa.table({"N": [1]}), pa.table([[1], [2]], names=["n", "n"])):
        with pytest.raises(InvalidInput, match="one column of this name"):
            broken(table, INTEGER)


def test_a_row_tells_every_rule_that_it_breaks() -> None:
    table = pa.table(
        {
            "n": [-1.0, None, math.nan, 5.0, math.inf, -math.inf, 10.0],
            "N": ["a", "b", None, "c", "a", "a", "a"],
        }
    )
    number = Feature(name="n", type=ColumnType.FLOAT, min=0, max=10, not_null=True)
    text = Feature(name="N", type=ColumnType.TEXT, allowed=("a", "b"))

    assert broken(table, number, text) == {
        1: {("min", "n")},
        2: {("not_null", "n")},
        3: {("not_null", "n")},
        4: {("allowed", "N")},
        5: {("max", "n")},
        6: {("min", "n")},
    }


def test_the_first_of_rows_with_the_same_key_and_time_counts() -> None:
    key = Feature(name="k", type=ColumnType.INTEGER)
    at = Feature(name="at", type=ColumnType.MOMENT)
    table = pa.table(
        {
            "k": [1, 2, 1, 1, None, None, 2],
            "at": pa.array([0, 0, 0, 1, 0, 0, 0], MOMENT),
            "n": [-1.0, *[1.0] * 6],
        }
    )
    given = {"required": ("k", "at"), "event_time": "at", "unique": ("k", "at")}

    found = broken(table, key, at, FLOAT.model_copy(update={"min": 0}), **given)

    assert found == {
        1: {("min", "n")},
        3: {("unique", "k, at")},
        5: {("not_null", "k")},
        6: {("not_null", "k")},
        7: {("unique", "k, at")},
    }


def test_bad_rows_at_the_borders_of_batches_are_the_ones_that_are_found() -> None:
    """Files are read in batches of 65,536 and 131,072 rows."""
    size, borders = 300_000, (1, 65_536, 65_537, 131_072, 131_073, 262_144, 262_145, 300_000)
    values = ["1"] * size
    for number, row in enumerate(borders):
        values[row - 1] = f"bad {number}"
    parts = [values[start : start + 65_536] for start in range(0, size, 65_536)]
    table = pa.table({"n": pa.chunked_array(parts), "k": pa.chunked_array([range(131_072), range(168_928)])})
    key = Feature(name="k", type=ColumnType.INTEGER, max=168_926)

    found = check_rows(table, rules(INTEGER, key), where="view trips")

    assert found.invalid is not None
    assert found.invalid[ROW].to_pylist() == [*borders]
    assert found.invalid["n"].to_pylist() == [f"bad {number}" for number in range(len(borders))]
    assert found.rows.num_rows == size - len(borders)
    assert [(each.rule, each.rows) for each in found.broken] == [("type", 8), ("max", 1)]


def test_more_invalid_rows_than_the_share_refuse_the_file(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(changed(max_invalid_share=0.1),))
    most = light_env.put("most", trips(*[1.0] * 9, -1.0))
    more = light_env.put("more", trips(*[1.0] * 8, -1.0, -2.0))
    every = light_env.put("every", trips("a", "b", "c"))

    assert light_env.features.ingest("trips", data=most).quarantined == 1
    for data in (more, every):
        with pytest.raises(InvalidInput, match="rows are invalid; at most 10 % may be") as refused:
            light_env.features.ingest("trips", data=data)
        assert refused.value.faults[0].where == "view trips.km"
    assert len(light_env.features.quarantined_batches("trips").items) == 1
    assert light_env.features.show("trips").rows == 9


def test_a_file_of_invalid_rows_only_may_be_quarantined_whole(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(changed(max_invalid_share=1),))

    done = light_env.features.ingest("trips", data=light_env.put("bad", trips("a", "b")))
    more = light_env.features.ingest("trips", data=light_env.put("good", trips(1.0)))

    assert (done.added, done.rows, done.quarantined) == (0, 0, 2)
    assert (more.added, more.rows, more.known_from) == (1, 1, None)
    assert light_env.features.ingest("trips", data=light_env.put("empty", trips()[:0])).quarantined == 0


def test_rules_refuse_the_file_where_nothing_else_is_said(light_env: FeaturesEnv) -> None:
    strict = changed(invalid_rows=InvalidRows.REFUSE, unique=True, max_ahead=HOUR)
    light_env.features.apply(entities=(DRIVER,), views=(strict,))
    future = light_env.platform.clock.now + 2 * HOUR
    rows = pa.concat_tables([trips(1.0, -1.0), trips(500.0, cars="green")])
    rows = rows.append_column("x", pa.array([1, 2, 3])).drop_columns("x")
    late = rows.set_column(1, "event_time", pa.array([NOON, future, NOON], MOMENT))

    with pytest.raises(InvalidInput) as refused:
        light_env.features.ingest("trips", data=light_env.put("rows", late))

    assert {(fault.where, fault.given) for fault in refused.value.faults} == {
        ("view trips.km", "-1.0 in row 2"),
        ("view trips.km", "500.0 in row 3"),
        ("view trips.car", "green in row 3"),
        ("view trips.event_time", f"{future:%Y-%m-%d %H:%M:%S.%f}Z in row 2"),
        ("view trips.driver, event_time", "0 in row 3"),
    }
    assert light_env.features.show("trips").rows == 0


def test_a_file_with_too_many_nulls_or_only_old_rows_is_refused(light_env: FeaturesEnv) -> None:
    view = changed(columns=(KM.model_copy(update={"max_null_rate": 0.25}), CAR), freshness=HOUR)
    light_env.features.apply(entities=(DRIVER,), views=(view,))
    light_env.features.ingest("trips", data=light_env.put("history", trips(1.0)))  # the first load is history
    light_env.features.ingest("trips", data=light_env.put("more", trips(2.0)), backfill=True)

    with pytest.raises(InvalidInput, match=r"2 of 4 rows without a value(.|\n)*at most 25 %"):
        light_env.features.ingest(
            "trips", data=light_env.put("nulls", trips(1.0, None, None, 2.0)), backfill=True
        )
    with pytest.raises(InvalidInput, match=r"newest 2024-06-01(.|\n)*freshness"):
        light_env.features.ingest("trips", data=light_env.put("old", trips(3.0)))
    assert stored(light_env) == [1.0, 2.0]


# ------------------------------------------------------------------------------------------- ingested later


def test_rows_that_repeat_others_stay_until_the_view_allows_it(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(changed(unique=True),))
    rows = pa.concat_tables([trips(1.0, 2.0), trips(7.0), trips(-1.0, start=3)])

    first = light_env.features.ingest("trips", data=light_env.put("rows", rows))
    unchanged = light_env.features.ingest_quarantined("trips-1")
    light_env.features.apply(views=(changed(unique=False),))
    done = light_env.features.ingest_quarantined("trips-1")

    assert (first.added, first.quarantined, unchanged.added, unchanged.quarantined) == (2, 2, 0, 2)
    assert {each.rule for each in unchanged.rules} == {RowRule.UNIQUE, RowRule.MIN}
    assert (done.added, done.quarantined) == (1, 1)
    assert stored(light_env) == [1.0, 2.0, 7.0]
    (shown,) = light_env.features.quarantined_rows("trips-1").items
    assert (shown.row, [each.rule for each in shown.broken]) == (4, [RowRule.MIN])


def test_rows_of_the_future_are_valid_when_their_time_has_come(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(changed(max_ahead=HOUR),))
    clock = light_env.platform.clock
    light_env.features.ingest("trips", data=light_env.put("history", trips(0.5)))
    rows = trips(1.0, 2.0).set_column(1, "event_time", pa.array([clock.now, clock.now + 2 * HOUR], MOMENT))
    early = light_env.features.ingest("trips", data=light_env.put("rows", rows))
    clock.advance(2 * HOUR)

    done = light_env.features.ingest_quarantined("trips-1")

    assert [(each.rule, each.column) for each in early.rules] == [(RowRule.MAX_AHEAD, "event_time")]
    assert (done.added, done.quarantined, done.known_from) == (
        1,
        0,
        clock.now,
    )  # not before it was in the view


def test_a_version_without_the_file_takes_none_of_its_rows(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    file = light_env.put("rows", trips(1.0, 150.0))
    light_env.features.ingest("trips", data=file)
    wider = changed(columns=(KM.model_copy(update={"max": 200}), CAR))
    light_env.features.apply(views=(wider,), keep_rows=KeepRows.NONE)

    with pytest.raises(Conflict, match="version 2 of view trips does not have the other rows"):
        light_env.features.ingest_quarantined("trips-1")

    assert light_env.features.ingest("trips", data=file).added == 2
    with on_terms(key="late"):
        assert light_env.features.ingest_quarantined("trips-1").added == 1  # asked for, after all


def test_a_column_that_came_later_is_null_in_quarantined_rows(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    light_env.features.ingest("trips", data=light_env.put("rows", trips("1.5", "2,5")))
    new = Feature(name="stops", type=ColumnType.INTEGER)
    text = Feature(name="car", type=ColumnType.TEXT)
    light_env.features.apply(views=(changed(columns=(Feature(name="km", type=ColumnType.FLOAT), text, new)),))

    assert light_env.features.ingest_quarantined("trips-1").quarantined == 1  # still no number
    light_env.features.discard_quarantined("trips-1")

    rows = light_env.features.scan("trips").read_all().to_pylist()
    assert [(row["km"], row["stops"]) for row in rows] == [(1.5, None)]


# -------------------------------------------------------------------------------------------------- files


def as_csv(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pa_csv.write_csv(table, sink)
    return sink.getvalue()


def as_parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=2)
    return sink.getvalue()


@pytest.mark.parametrize("written", [as_csv, as_parquet])
def test_csv_and_parquet_are_checked_alike(light_env: FeaturesEnv, written: Any) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    rows = trips("1.5", "much", "2.5", "-3", kind=pa.string())

    done = light_env.features.ingest("trips", data=light_env.platform.put("rows", written(rows)).id)

    assert (done.added, done.quarantined) == (2, 2)
    assert {(each.rule, each.rows) for each in done.rules} == {("type", 1), ("min", 1)}
    assert [row.row for row in light_env.features.quarantined_rows("trips-1").items] == [2, 4]


def test_one_wrong_value_of_a_csv_column_does_not_change_how_the_others_are_read(
    light_env: FeaturesEnv,
) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(changed(columns=(KM,)),))
    text = b"driver,event_time,km\n1,2024-06-01, 1.5\n2,2024-06-02,\n3,2024-06-03,NA\n4,soon,2\n x,2024-06-05,2\n"
    text += b"6,2024-06-06,inf\n7,2024-06-07,7\n8,2024-06-08,many\n9,2024-06-09 ,9\n"

    done = light_env.features.ingest("trips", data=light_env.platform.put("rows", text).id)

    assert {(each.rule, each.column, each.rows) for each in done.rules} == {
        ("type", "event_time", 1),
        ("type", "driver", 1),
        ("type", "km", 1),
        ("max", "km", 1),
    }
    assert stored(light_env) == [1.5, None, None, 7.0, 9.0]
    shown = light_env.features.quarantined_rows("trips-1")
    values = [row.values[shown.columns.index(row.broken[0].column)] for row in shown.items]
    assert values == ["soon", "x", "inf", "many"]


def test_rows_are_checked_after_the_sql_of_the_view(light_env: FeaturesEnv) -> None:
    sql = "SELECT driver, event_time, TRY_CAST(km AS DOUBLE) * 10 AS km, car FROM source ORDER BY driver"
    light_env.features.apply(entities=(DRIVER,), views=(changed(sql=sql),))

    done = light_env.features.ingest("trips", data=light_env.put("rows", trips("1", "11", "x", "2")))

    assert (done.added, done.quarantined) == (3, 1)
    assert stored(light_env) == [10.0, None, 20.0]
    assert light_env.features.quarantined_rows("trips-1").items[0].values[2] == "110.0"


def test_pages_end_before_their_answer_is_too_large(light_env: FeaturesEnv) -> None:
    columns = tuple(Feature(name=f"t{n}", type=ColumnType.TEXT) for n in range(300))
    light_env.features.apply(
        entities=(DRIVER,), views=(changed(columns=(KM, *columns), max_invalid_share=1),)
    )
    rows = trips(*[-1.0] * 40).drop_columns("car")
    for column in columns:
        rows = rows.append_column(column.name, pa.array(["long " * 50] * 40))
    light_env.features.ingest("trips", data=light_env.put("rows", rows))

    seen, after = [], ""
    while True:
        page = light_env.features.quarantined_rows("trips-1", after=after, limit=1000)
        assert len(page.model_dump_json()) < 1 << 20
        seen += [row.row for row in page.items]
        if page.next is None:
            break
        after = page.next

    assert seen == [*range(1, 41)]
    assert len(page.items) < 40


# -------------------------------------------------------------------------------------------- governance


def test_rows_are_for_those_who_may_read_the_view(light_env: FeaturesEnv) -> None:
    platform = light_env.platform
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    light_env.features.ingest("trips", data=light_env.put("rows", trips(1.0, -1.0)))
    viewer, nobody = platform.join("sara", Role.VIEWER), platform.join("omar")

    with acting_as(viewer):
        assert light_env.features.quarantined_batches("trips").items[0].by
        assert light_env.features.quarantined_rows("trips-1").items
        for act in (light_env.features.discard_quarantined, light_env.features.ingest_quarantined):
            with pytest.raises(Denied):
                act("trips-1")
        with pytest.raises(NotFound):
            platform.blobs.read(light_env.features.quarantined_batches("trips").items[0].id)
    with acting_as(nobody), pytest.raises(NotFound):
        light_env.features.quarantined_rows("trips-1")
    with acting_as(nobody), pytest.raises(NotFound):
        light_env.features.quarantined_batches("trips")
    forbidden = (
        'forbid(principal, action == Action::"features.scan", resource) when {resource.name == "trips"};'
    )
    platform.policies.publish("no-rows", text=forbidden)
    with acting_as(viewer):
        assert light_env.features.quarantined_batches("trips").items
        with pytest.raises(Denied, match=r"features\.scan"):
            light_env.features.quarantined_rows("trips-1")
    platform.policies.publish("no-rows", text=forbidden.replace("scan", "ingest"))
    with acting_as(platform.join("dana", Role.DEVELOPER)), pytest.raises(Denied, match=r"features\.ingest"):
        light_env.features.ingest_quarantined("trips-1")


def test_restrictions_lineage_and_erasure_reach_quarantined_rows(light_env: FeaturesEnv) -> None:
    platform = light_env.platform
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    file = light_env.put("rows", trips(1.0, -1.0, 150.0, 2.0), only=("AE",))
    light_env.features.ingest("trips", data=file)
    (batch,) = light_env.features.quarantined_batches("trips").items

    assert platform.objects.show(batch.id).label.only == {"AE"}
    assert {node.id for node in platform.lineage.graph(batch.id) if node.depth < 0} >= {file, batch.view}
    platform.objects.label(batch.view, classes=("personal",))
    assert "personal" in platform.objects.show(batch.id).label.classes
    light_env.features.apply(views=(changed(columns=(KM.model_copy(update={"max": 200}), CAR)),))
    light_env.features.ingest_quarantined("trips-1")
    platform.objects.label(batch.view, classes=("personal", "health"))  # there is no cycle to stop at
    assert "health" in platform.objects.show(batch.id).label.classes

    platform.keys.destroy("default")

    for act in (light_env.features.quarantined_rows, light_env.features.ingest_quarantined):
        with pytest.raises(KeyUnavailable):
            act("trips-1")
    assert light_env.features.discard_quarantined("trips-1").discarded == 1


def test_a_refused_file_leaves_no_bytes(light_env: FeaturesEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    file = light_env.put("rows", trips(1.0, -1.0))
    before = kept_bytes(light_env)

    def fail(*args: object, **options: object) -> None:
        raise Conflict("not now")

    with monkeypatch.context() as broken_store:
        broken_store.setattr("falaj.features.store.publish_rows", fail)
        with pytest.raises(Conflict, match="not now"):
            light_env.features.ingest("trips", data=file)

    assert kept_bytes(light_env) == before
    assert light_env.features.quarantined_batches("trips").items == ()
    assert light_env.features.ingest("trips", data=file).quarantined == 1
