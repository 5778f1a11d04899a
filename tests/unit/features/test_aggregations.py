"""Aggregations in joins: values over the rows of a window that were known."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.drivers.duckdb.queries import DuckDbQueryEngine
from falaj.features.aggregations import aggregate, newest_windows
from falaj.features.joins import ARRIVAL, ROW, join, newest_rows
from falaj.features.views import join_input
from falaj.records.features import (
    AggregateFunction,
    Aggregation,
    ColumnType,
    Feature,
    FeatureView,
    StoredView,
)
from falaj.records.governance.residency import UNRESTRICTED
from falaj.records.names import ObjectId

QUERIES = DuckDbQueryEngine(threads=1)
MOMENT = pa.timestamp("us", "UTC")
MICROSECOND = timedelta(microseconds=1)
"""The unit of all times here."""


class Flight(NamedTuple):
    """A flight departs at `event`; its delay is known at `created`, on arrival or, if corrected, long after."""

    carrier: str
    event: int
    created: int
    delay: float | None


def delays(*windows: int, functions: Sequence[AggregateFunction] = (AggregateFunction.SUM,)) -> StoredView:
    return StoredView(
        id=ObjectId("view_1"),
        workspace=ObjectId("workspace_1"),
        zone="local",
        label=UNRESTRICTED,
        version=1,
        definition=FeatureView(
            name="delays",
            entities=("carrier",),
            columns=(Feature(name="delay", type=ColumnType.FLOAT),),
            event_time="event",
            created_time="created",
            aggregations=tuple(
                Aggregation(
                    name=f"{function}_{window}",
                    column="delay",
                    function=function,
                    window=timedelta(microseconds=window),
                )
                for window in windows
                for function in functions
            ),
        ),
        keys=(Feature(name="carrier", type=ColumnType.TEXT),),
        table_version=0,
        rows=0,
        created_at=datetime(2024, 6, 1, tzinfo=UTC),
    )


DELAYS = delays(2, 5)
EVERYTHING = delays(1, 3, 8, functions=tuple(AggregateFunction))

carriers = st.sampled_from(["EK", "EY", "G9"])
moments = st.integers(-4, 12)
flights = st.lists(
    st.builds(
        lambda carrier, event, took, delay: Flight(carrier, event, event + took, delay),
        carriers,
        moments,
        st.one_of(st.just(0), st.integers(-1, 6), st.just(15)),
        st.one_of(st.none(), st.integers(-9, 9).map(float)),
    ),
    max_size=30,
)
spines = st.lists(st.tuples(carriers, st.integers(-5, 30)), min_size=1, max_size=24)

ttls = st.one_of(st.none(), st.integers(1, 9))


def table_of(rows: list[Flight]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * 4
    return pa.table(
        {
            "carrier": pa.array(columns[0], pa.string()),
            "event": pa.array(columns[1], MOMENT),
            "created": pa.array(columns[2], MOMENT),
            "delay": pa.array(columns[3], pa.float64()),
            ARRIVAL: pa.array(range(len(rows)), pa.int64()),
        }
    )


def found(
    view: StoredView, rows: list[Flight], spine: list[tuple[str, int]]
) -> list[tuple[float | None, ...]]:
    """Return the join's result for each row of the spine."""
    spine_rows = pa.table(
        {
            "carrier": [carrier for carrier, _ in spine],
            "event_time": pa.array([at for _, at in spine], MOMENT),
            ROW: range(len(spine)),
        }
    )
    inputs = {"spine": spine_rows, "rows": aggregate(QUERIES, view, table_of(rows))}
    table = join(QUERIES, inputs, ["carrier"], event_time="event_time", views=[join_input(view, "rows")])
    return list(zip(*(table[each.name].to_pylist() for each in view.definition.aggregations), strict=True))


def reference(view: StoredView, rows: list[Flight], carrier: str, at: int) -> tuple[float | None, ...]:
    """Aggregate over what was known: throw away everything else, and look at the window of the newest row."""
    known = [row for row in rows if row.carrier == carrier and max(row.event, row.created) <= at]
    if not known:
        return (None,) * len(view.definition.aggregations)
    newest = max(row.event for row in known)
    if view.definition.ttl is not None and at - newest > view.definition.ttl // MICROSECOND:
        return (None,) * len(view.definition.aggregations)
    return tuple(
        aggregated(
            each.function, [row.delay for row in known if row.event > newest - each.window // MICROSECOND]
        )
        for each in view.definition.aggregations
    )


def aggregated(function: AggregateFunction, given: list[float | None]) -> float | None:
    values = [value for value in given if value is not None]
    if function is AggregateFunction.COUNT:
        return len(values)
    if len(values) < (2 if function is AggregateFunction.STD else 1):
        return None
    functions: dict[AggregateFunction, Callable[[list[float]], float]] = {
        AggregateFunction.SUM: sum,
        AggregateFunction.MEAN: statistics.fmean,
        AggregateFunction.MIN: min,
        AggregateFunction.MAX: max,
        AggregateFunction.STD: statistics.stdev,
    }
    return functions[function](values)


def rounded(values: Iterable[float | None]) -> tuple[float | None, ...]:
    return tuple(None if value is None else round(value, 9) + 0.0 for value in values)


def assert_as_known(rows: list[Flight], spine: list[tuple[str, int]], ttl: int | None) -> None:
    view = with_ttl(EVERYTHING, ttl)

    seen = found(view, rows, spine)

    assert [rounded(each) for each in seen] == [
        rounded(reference(view, rows, carrier, at)) for carrier, at in spine
    ]


@pytest.mark.slow
@settings(max_examples=10)
@given(rows=flights, spine=spines, ttl=ttls)
def test_a_window_has_the_rows_that_were_known(
    rows: list[Flight], spine: list[tuple[str, int]], ttl: int | None
) -> None:
    assert_as_known(rows, spine, ttl)


@pytest.mark.slow
@settings(max_examples=100)
@given(rows=flights, spine=spines, ttl=ttls)
def test_many_windows_have_the_rows_that_were_known(
    rows: list[Flight], spine: list[tuple[str, int]], ttl: int | None
) -> None:
    assert_as_known(rows, spine, ttl)


@pytest.mark.slow
@settings(max_examples=8)
@given(rows=flights, carrier=carriers, at=moments)
def test_rows_that_are_not_known_yet_change_nothing(rows: list[Flight], carrier: str, at: int) -> None:
    otherwise = [row._replace(delay=1e6) if max(row.event, row.created) > at else row for row in rows]
    without = [row for row in rows if max(row.event, row.created) <= at]

    seen = [found(DELAYS, each, [(carrier, at)]) for each in (rows, otherwise, without)]

    assert seen[0] == seen[1] == seen[2]


@pytest.mark.slow
@settings(max_examples=20)
@given(rows=flights, since=st.integers(-5, 20))
def test_the_newest_windows_are_those_of_joins_from_then_on(rows: list[Flight], since: int) -> None:
    recent = QUERIES.select(newest_windows(EVERYTHING, "source", since=since), {"source": table_of(rows)})

    newest = newest_rows(join_input(EVERYTHING, "rows"), since=since)
    online = QUERIES.select(newest, {"rows": aggregate(QUERIES, EVERYTHING, recent)}).to_pylist()

    names = [each.name for each in EVERYTHING.definition.aggregations]
    for at in (*range(since, since + 12), 10**6):
        for carrier in {row.carrier for row in rows}:
            known = [row for row in online if row["carrier"] == carrier and row["__known"] <= at]
            shown = max(known, key=lambda row: row["__known"], default=dict.fromkeys(names))
            expected = reference(EVERYTHING, rows, carrier, at)
            assert rounded(shown[name] for name in names) == rounded(expected)


def test_a_late_row_does_not_hide_what_was_known() -> None:
    early, late = Flight("EK", 3, 3, 1.0), Flight("EK", 2, 8, 4.0)

    assert found(DELAYS, [early, late], [("EK", 4), ("EK", 7), ("EK", 8)]) == [
        (1.0, 1.0),
        (1.0, 1.0),
        (5.0, 5.0),
    ]


def test_the_delay_of_a_flight_in_the_air_is_not_visible_at_another_departure() -> None:
    landed, in_the_air, short = Flight("EK", 0, 2, 10.0), Flight("EK", 3, 9, 500.0), Flight("EK", 4, 5, 20.0)

    seen = found(DELAYS, [landed, in_the_air, short], [("EK", 4), ("EK", 6), ("EK", 9)])

    assert seen == [(10.0, 10.0), (20.0, 30.0), (520.0, 530.0)]


def test_an_aggregation_may_have_the_name_of_its_column() -> None:
    renamed = DELAYS.definition.aggregations[0].model_copy(update={"name": "delay"})
    definition = DELAYS.definition.model_copy(update={"aggregations": (renamed,)})
    view = DELAYS.model_copy(update={"definition": definition})

    assert found(view, [Flight("EK", 3, 3, 1.0), Flight("EK", 2, 8, 4.0)], [("EK", 7), ("EK", 8)]) == [
        (1.0,),
        (5.0,),
    ]


def with_ttl(view: StoredView, ttl: int | None) -> StoredView:
    limit = None if ttl is None else ttl * MICROSECOND
    return view.model_copy(update={"definition": view.definition.model_copy(update={"ttl": limit})})
