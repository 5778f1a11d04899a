"""Point-in-time joins against a brute-force reference."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.drivers.duckdb.queries import DuckDbQueryEngine
from falaj.features.joins import (
    ARRIVAL,
    INGESTED,
    ROW,
    JoinedView,
    join,
    newest_rows,
    pair_counts,
    point_in_time_join,
)

QUERIES = DuckDbQueryEngine(threads=1)
MOMENT = pa.timestamp("us", "UTC")


class Row(NamedTuple):
    """A row of a view: its entity, event time, knowledge time and value."""

    city: str | None
    driver: int | None
    event: int | None
    created: int | None
    value: int | None


class View(NamedTuple):
    rows: list[Row]
    keys: tuple[str, ...]
    ttl: int | None
    created: str | None
    in_pairs: bool


def reference(spine: list[tuple[Any, ...]], view: View) -> list[int | None]:
    """Return the expected result of the join, row by row."""
    return [_seen(city, driver, at, view) for city, driver, at in spine]


def _seen(city: str | None, driver: int | None, at: int | None, view: View) -> int | None:
    wanted = {"city": city, "driver": driver}
    best: tuple[tuple[int, int, int], int | None] | None = None
    for arrival, row in enumerate(view.rows):
        created = row.created if view.created else row.event
        if created is None and view.created == INGESTED:  # of a back-fill
            created = row.event
        if at is None or row.event is None or created is None or row.event > at or created > at:
            continue
        if any(wanted[key] is None or getattr(row, key) != wanted[key] for key in view.keys):
            continue
        order = (row.event, created, arrival)
        if best is None or order > best[0]:
            best = (order, row.value)
    if best is None or (view.ttl is not None and at is not None and at - best[0][0] > view.ttl):
        return None
    return best[1]


few_moments = st.sampled_from([None, *range(-3, 13)])
cities = st.sampled_from([None, "", "al ain", "dubai", "dubai", "dubai", "dubai"])
drivers = st.sampled_from([None, 3, 2, 1, 1, 1, 1])
values = st.one_of(st.none(), st.integers(0, 99))
row = st.builds(Row, cities, drivers, few_moments, few_moments, values)
rows = st.one_of(st.lists(row, max_size=3), st.lists(row, min_size=10, max_size=25))
views = st.builds(
    View,
    rows,
    st.sampled_from([("city",), ("driver",), ("city", "driver")]),
    st.one_of(st.none(), st.integers(0, 8)),
    st.sampled_from([None, "created", INGESTED]),
    st.booleans(),
)
spines = st.one_of(st.just([]), st.lists(st.tuples(cities, drivers, few_moments), min_size=8, max_size=20))


def table_of(view: View) -> pa.Table:
    columns = list(zip(*view.rows, strict=True)) or [()] * 5
    return pa.table(
        {
            "city": pa.array(columns[0], pa.string()),
            "driver": pa.array(columns[1], pa.int64()),
            "event": pa.array(columns[2], MOMENT),
            "created": pa.array(columns[3], MOMENT),
            INGESTED: pa.array(columns[3], MOMENT),
            "value": pa.array(columns[4], pa.int64()),
            ARRIVAL: pa.array(range(len(view.rows)), pa.int64()),
        }
    )


def joined(view: View, number: int) -> JoinedView:
    return JoinedView(
        rows=f"view{number}",
        keys=view.keys,
        event_time="event",
        created_time=view.created,
        ttl=None if view.ttl is None else timedelta(microseconds=view.ttl),
        features={"value": f"view{number}__value"},
        in_pairs=view.in_pairs,
    )


def spine_table(spine: list[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*spine, strict=True)) or [()] * 3
    return pa.table(
        {
            "city": pa.array(columns[0], pa.string()),
            "driver": pa.array(columns[1], pa.int64()),
            "at": pa.array(columns[2], MOMENT),
            ROW: pa.array(range(len(spine)), pa.int64()),
        }
    )


@pytest.mark.slow
@settings(max_examples=60)
@given(spine=spines, joins=st.lists(views, min_size=1, max_size=3))
def test_the_join_equals_a_naive_scan(spine: list[tuple[Any, ...]], joins: list[View]) -> None:
    sql = point_in_time_join(
        "spine",
        ["city", "driver", "at"],
        event_time="at",
        views=[joined(view, number) for number, view in enumerate(joins)],
    )

    found = QUERIES.select(
        sql, {"spine": spine_table(spine)} | {f"view{n}": table_of(view) for n, view in enumerate(joins)}
    )

    assert found.select(["city", "driver", "at"]).equals(spine_table(spine).drop_columns([ROW]))
    for number, view in enumerate(joins):
        assert found[f"view{number}__value"].to_pylist() == reference(spine, view)


@settings(max_examples=20)
@given(spine=spines, joins=st.lists(views, min_size=1, max_size=2))
def test_pair_counts_equal_a_naive_count(spine: list[tuple[Any, ...]], joins: list[View]) -> None:
    sql = pair_counts("spine", [joined(view, number) for number, view in enumerate(joins)])
    inputs = {"spine": spine_table(spine)} | {f"view{n}": table_of(view) for n, view in enumerate(joins)}

    (found,) = QUERIES.select(sql, inputs).to_pylist()

    for number, view in enumerate(joins):
        keys = [{"city": city, "driver": driver} for city, driver, _ in spine]
        pairs = sum(
            all(key[name] is not None and key[name] == getattr(row, name) for name in view.keys)
            for key in keys
            for row in view.rows
        )
        assert (found[f"pairs{number}"], found[f"rows{number}"]) == (pairs, len(view.rows))


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize(
    ("rows", "ttl", "expected"),
    [
        ([Row("dubai", 1, 1, 9, 1), Row("dubai", 1, 5, 5, 2)], None, 2),  # known later, happened earlier
        ([Row("dubai", 1, 5, 7, 1), Row("dubai", 1, 5, 6, 2)], None, 1),  # of one event, the later created
        ([Row("dubai", 1, 5, 6, 1), Row("dubai", 1, 5, 6, 2)], None, 2),  # and then the later arrival
        ([Row("dubai", 1, 5, 11, 1), Row("dubai", 1, 4, 4, 2)], None, 2),  # not known yet
        ([Row("dubai", 1, 5, 3, 1), Row("dubai", 1, 5, 4, None)], None, None),  # null is a value too
        ([Row("dubai", 1, 5, 5, 1)], 5, 1),
        ([Row("dubai", 1, 5, 5, 1)], 4, None),  # too old
    ],
)
def test_the_join_picks_the_newest_known_row_within_ttl(
    rows: list[Row], ttl: int | None, expected: int | None, in_pairs: bool
) -> None:
    view = View(rows, ("city",), ttl, "created", in_pairs)
    sql = point_in_time_join("spine", ["at"], event_time="at", views=[joined(view, 0)])

    found = QUERIES.select(sql, {"spine": spine_table([("dubai", 1, 10)]), "view0": table_of(view)})

    assert found["view0__value"].to_pylist() == [expected] == reference([("dubai", 1, 10)], view)


@pytest.mark.parametrize(("spine_rows", "in_pairs"), [(1, True), (4, True), (5, False)])
def test_a_view_is_sorted_where_its_keys_have_many_rows(spine_rows: int, in_pairs: bool) -> None:
    queries: list[str] = []

    class RecordingQueries:
        def select(self, sql: str, inputs: Any) -> Any:
            queries.append(sql)
            return QUERIES.select(sql, inputs)

    view = View([Row("dubai", 1, at, at, at) for at in range(6)], ("city",), None, None, False)
    spine = [("dubai", 1, 3)] * spine_rows
    inputs = {"spine": spine_table(spine), "view0": table_of(view)}

    found = join(RecordingQueries(), inputs, ["at"], event_time="at", views=[joined(view, 0)])

    assert found["view0__value"].to_pylist() == [3] * spine_rows
    assert ("ASOF" not in queries[-1]) == in_pairs


@settings(max_examples=20)
@given(view=views, since=st.integers(0, 12))
def test_the_newest_rows_of_a_key_equal_joins_from_then_on(view: View, since: int) -> None:
    forever = View([row._replace() for row in view.rows], view.keys, None, view.created, False)
    keyed = [row for row in view.rows if all(getattr(row, key) is not None for key in view.keys)]

    sql = newest_rows(joined(forever, 0), since=since)
    found = QUERIES.select(sql, {"view0": table_of(forever)}).to_pylist()

    for at in (*range(since, since + 15), 10**9):
        by_key = {
            tuple(row[key] for key in view.keys): row["value"]
            for row in sorted(found, key=lambda row: row["__known"])
            if row["__known"] <= at
        }
        expected = reference([(row.city, row.driver, at) for row in keyed], forever)
        for row, value in zip(keyed, expected, strict=True):
            assert by_key.get(tuple(getattr(row, key) for key in view.keys)) == value
