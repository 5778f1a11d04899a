"""Time-window aggregations as SQL: for each row of a view, aggregates over the window that ends with it.

A feature has the value that an aggregation over the rows known at that moment would give: a window ends with the newest
of them, and has those of them that lie in it. A late row therefore makes a new version of the windows that it touches,
known from when the row was known; what was known before stays visible until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from falaj.features.joins import ARRIVAL, created_column, quoted
from falaj.ports.queries import ArrowInput, ArrowTable, QueryEngine
from falaj.records.features import AggregateFunction, Aggregation, ColumnType, Feature, StoredView

SQL_NAMES = {AggregateFunction.MEAN: "avg", AggregateFunction.STD: "stddev_samp"}

LATE = "__late"
"""Whether a row of the window became known later than the row that it ends with."""

_MICROSECOND = timedelta(microseconds=1)


def aggregate(queries: QueryEngine, view: StoredView, rows: ArrowInput) -> ArrowTable:
    """Return keys, times and features of the versions of all windows of `rows`, known from their created times on."""
    found = queries.select(windows(view, "source"), {"source": rows})
    if LATE not in found.column_names:
        return found
    sql = f"SELECT coalesce(bool_or({LATE}), false) AS late FROM windows"  # noqa: S608 - a constant
    if not queries.select(sql, {"windows": found})["late"][0].as_py():
        return found.drop_columns([LATE])
    return queries.select(window_versions(view, "source", "windows"), {"source": rows, "windows": found})


def windows(view: StoredView, rows: str) -> str:
    """Select keys, times, features and `__late` of every row of the input `rows`, as if all of its windows were known.

    A window is (event - window, event]. Without a created time no row is late.
    """
    keys, event, created = _names(view)
    found = [keys, event, ARRIVAL]
    if created is not None:
        known = f"greatest({event}, {created})"  # null is ignored
        last = f"max({known}) OVER ({_frame(keys, event, _longest(view))})"
        found += [f"{known} AS {created}", f"{last} > {known} AS {LATE}"]
    found += [
        _aggregated(each, feature, quoted(each.column), f"OVER ({_frame(keys, event, each.window)})")
        for each, feature in _aggregations(view)
    ]
    return f"SELECT {', '.join(found)} FROM {quoted(rows)}"  # noqa: S608 - names are quoted


def window_versions(view: StoredView, rows: str, windows: str) -> str:
    """Select the version of the windows of each key at every moment at which one of its rows became known.

    The input `windows` is what `windows` selects from the input `rows`; it has the values of versions without late
    rows. The others are aggregated anew, from the rows known by then. Rows are compared within parts of time as long as
    the longest window, so that a version is compared with few rows that do not belong to it.
    """
    keys, event, created = _names(view)
    definition, longest = view.definition, _longest(view) // _MICROSECOND
    columns = {
        name: f"__c{number}" for number, name in enumerate(column.name for column in definition.columns)
    }
    named = [f"{quoted(key.name)} AS __k{number}" for number, key in enumerate(view.keys)]
    named += [f"{quoted(each.column)} AS {columns[each.column]}" for each in definition.aggregations]
    own = [f"__k{number}" for number in range(len(view.keys))]
    same = " AND ".join(f"r.{key} = t.{key}" for key in own)
    features = [
        _aggregated(
            each,
            feature,
            f"r.{columns[each.column]}",
            f"FILTER (WHERE r.__at > t.__end - {each.window // _MICROSECOND})",
        )
        for each, feature in _aggregations(view)
    ]
    shown = ", ".join(
        [keys, event, str(created), ARRIVAL, *(quoted(each.name) for each in definition.aggregations)]
    )
    return f"""
WITH r AS MATERIALIZED (
    SELECT {", ".join(dict.fromkeys(named))}, {ARRIVAL}, {event} AS __time, greatest({event}, {created}) AS __known,
        epoch_us({event}) AS __at, epoch_us({event}) // {longest} AS __part
    FROM {quoted(rows)}
), moments AS (
    SELECT *, max(__time) OVER (PARTITION BY {", ".join(own)} ORDER BY __known) AS __newest FROM r
), versions AS MATERIALIZED (
    SELECT {", ".join(own)}, __newest, __known, max(m.{ARRIVAL}) AS {ARRIVAL}, max(__at) AS __last,
        epoch_us(__newest) AS __end, max(m.{ARRIVAL}) FILTER (WHERE __time = __newest AND NOT w.{LATE}) AS __computed
    FROM moments AS m JOIN {quoted(windows)} AS w ON w.{ARRIVAL} = m.{ARRIVAL}
    GROUP BY {", ".join(own)}, __newest, __known
), touched AS (
    SELECT *, unnest([__end // {longest}, __end // {longest} - 1]) AS __part FROM versions
    WHERE __computed IS NULL AND __last > __end - {longest}
)
SELECT {shown} FROM {quoted(windows)} WHERE {ARRIVAL} IN (SELECT __computed FROM versions)
UNION ALL
SELECT {", ".join(f"t.{key}" for key in own)}, t.__newest, t.__known, t.{ARRIVAL}, {", ".join(features)}
FROM touched AS t JOIN r ON {same} AND r.__part = t.__part AND r.__known <= t.__known AND r.__at > t.__end - {longest}
GROUP BY {", ".join(f"t.{key}" for key in own)}, t.__newest, t.__known, t.{ARRIVAL}, t.__end
"""  # noqa: S608 - names are quoted


def newest_windows(view: StoredView, rows: str, *, since: int) -> str:
    """Select the rows of the input `rows` that lie in windows of those that are the newest known from `since` on.

    These windows end with the newest row that is known at `since`, or later.
    """
    keys, event, created = _names(view)
    longest = _longest(view) // _MICROSECOND
    known = f"epoch_us({event})" if created is None else f"greatest(epoch_us({event}), epoch_us({created}))"
    newest = (
        f"SELECT {keys}, max(epoch_us({event})) FILTER (WHERE {known} <= {since}) AS __newest"  # noqa: S608
        f" FROM {quoted(rows)} GROUP BY {keys}"
    )
    return (
        f"SELECT all_rows.* FROM {quoted(rows)} AS all_rows JOIN ({newest}) USING ({keys})"  # noqa: S608
        f" WHERE coalesce(epoch_us({event}) > __newest - {longest}, true)"
    )


def _names(view: StoredView) -> tuple[str, str, str | None]:
    """Return the columns of the keys, of the event time and of the created time, quoted."""
    created = created_column(view)
    keys = ", ".join(quoted(key.name) for key in view.keys)
    return keys, quoted(view.definition.event_time), None if created is None else quoted(created)


def _aggregations(view: StoredView) -> Iterator[tuple[Aggregation, Feature]]:
    return zip(view.definition.aggregations, view.definition.features, strict=True)


def _longest(view: StoredView) -> timedelta:
    return max(each.window for each in view.definition.aggregations)


def _aggregated(each: Aggregation, feature: Feature, column: str, over: str) -> str:
    """Select an aggregation. Integers stay integers: a double holds them up to 2**53 only.

    What infinities have no value for, such as the sum of both, is null, as NaN is everywhere.
    """
    found = f"{SQL_NAMES.get(each.function, each.function.value)}({column}) {over}"
    if feature.type is ColumnType.INTEGER:
        return f"CAST({found} AS BIGINT) AS {quoted(each.name)}"
    return f"nullif(CAST({found} AS DOUBLE), 'nan'::DOUBLE) AS {quoted(each.name)}"


def _frame(keys: str, event: str, length: timedelta) -> str:
    before = length // _MICROSECOND - 1
    return f"PARTITION BY {keys} ORDER BY epoch_us({event}) RANGE BETWEEN {before} PRECEDING AND CURRENT ROW"
