"""Aggregations in joins: values over windows, without rows that were not known yet."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.drivers.duckdb.queries import DuckDbQueryEngine
from falaj.features.aggregations import aggregated_rows, newest_windows
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
WINDOWS = (2, 5)
"""In microseconds, as all moments here."""


class Flight(NamedTuple):
    """It departs at `event`, and its delay is known at `created`, on arrival or, corrected, long after."""

    carrier: str
    event: int
    created: int
    delay: float


DELAYS = StoredView(
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
                name=f"sum_{window}",
                column="delay",
                function=AggregateFunction.SUM,
                window=timedelta(microseconds=window),
            )
            for window in WINDOWS
        ),
    ),
    keys=(Feature(name="carrier", type=ColumnType.TEXT),),
    table_version=0,
    rows=0,
    created_at=datetime(2024, 6, 1, tzinfo=UTC),
)

carriers = st.sampled_from(["EK", "EY"])
moments = st.integers(0, 12)
flights = st.lists(
    st.builds(
        lambda carrier, event, took, delay: Flight(carrier, event, event + took, float(delay)),
        carriers,
        moments,
        st.integers(-1, 6),
        st.integers(1, 9),
    ),
    max_size=24,
)
spines = st.lists(st.tuples(carriers, moments), min_size=1, max_size=16)


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


def summed(rows: pa.Table) -> pa.Table:
    return QUERIES.select(aggregated_rows(DELAYS, "source"), {"source": rows})


def found(rows: list[Flight], spine: list[tuple[str, int]]) -> list[tuple[float | None, ...]]:
    """What the join says of each row of the spine."""
    asked = pa.table(
        {
            "carrier": [carrier for carrier, _ in spine],
            "event_time": pa.array([at for _, at in spine], MOMENT),
            ROW: range(len(spine)),
        }
    )
    inputs = {"spine": asked, "rows": summed(table_of(rows))}
    table = join(QUERIES, inputs, ["carrier"], event_time="event_time", views=[join_input(DELAYS, "rows")])
    return list(zip(*(table[f"sum_{window}"].to_pylist() for window in WINDOWS), strict=True))


def reference(rows: list[Flight], carrier: str, at: int) -> tuple[float | None, ...]:
    """The sums of the newest row of which all that it sums up was known; ties as a join breaks them."""
    best: tuple[tuple[int, int, int], tuple[float, ...]] | None = None
    own = [(number, row) for number, row in enumerate(rows) if row.carrier == carrier]
    for number, row in own:
        window = [each for _, each in own if row.event - max(WINDOWS) < each.event <= row.event]
        known = max(each.created for each in window)
        if max(known, row.event) > at:
            continue
        sums = tuple(
            sum(each.delay for each in window if row.event - length < each.event) for length in WINDOWS
        )
        if best is None or (row.event, known, number) > best[0]:
            best = ((row.event, known, number), sums)
    return (None,) * len(WINDOWS) if best is None else best[1]


@settings(max_examples=20)
@given(rows=flights, spine=spines)
def test_a_window_is_seen_when_the_last_of_its_rows_was_known(
    rows: list[Flight], spine: list[tuple[str, int]]
) -> None:
    assert found(rows, spine) == [reference(rows, carrier, at) for carrier, at in spine]


@settings(max_examples=20)
@given(rows=flights, carrier=carriers, at=moments)
def test_what_is_not_known_yet_changes_nothing(rows: list[Flight], carrier: str, at: int) -> None:
    otherwise = [row._replace(delay=1e6) if max(row.event, row.created) > at else row for row in rows]

    assert found(otherwise, [(carrier, at)]) == found(rows, [(carrier, at)])


@settings(max_examples=20)
@given(rows=flights)
def test_the_newest_windows_alone_say_what_all_rows_say(rows: list[Flight]) -> None:
    recent = QUERIES.select(newest_windows(DELAYS, "source"), {"source": table_of(rows)})

    alone, among_all = (
        QUERIES.select(newest_rows(join_input(DELAYS, "rows")), {"rows": summed(source)}).sort_by("carrier")
        for source in (recent, table_of(rows))
    )

    assert alone.to_pydict() == among_all.to_pydict()


def test_the_delay_of_a_flight_in_the_air_is_not_seen_by_one_that_departs() -> None:
    landed, in_the_air, short = Flight("EK", 0, 2, 10.0), Flight("EK", 3, 9, 500.0), Flight("EK", 4, 5, 20.0)

    seen = found([landed, in_the_air, short], [("EK", 6), ("EK", 9)])

    assert seen == [(10.0, 10.0), (520.0, 530.0)]
