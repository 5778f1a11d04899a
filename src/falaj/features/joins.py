"""Point-in-time joins as SQL: for every row of a spine, the features of its entity as known at its time.

A row of a view is *known* from the later of its event time and its created time, which is a column of the view or when
the row came in. Of the known rows, the one with the newest event time is selected; ties go to the later created time,
then to the later arrival. Two plans find it:

- in order: a row that becomes known after one with a newer event time is never selected. Without such rows, the
  selected row is the last that became known, which ASOF JOIN finds in one pass over sorted rows.
- in pairs: compare every spine row with every row of its key. Nothing is sorted, so this takes half the time where
  keys have few rows, and far too long where they have many; `pair_counts` tells which case applies.

Both plans read only keys and times; the features of the selected rows are fetched last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from falaj.errors import InvalidInput
from falaj.ports.queries import ArrowInput, ArrowTable, QueryEngine
from falaj.records.features import Feature, FeatureView, KnownAt, StoredView
from falaj.records.names import repeated_names

ROW = "__row"
"""The number of a spine row, by which the result is ordered."""
ARRIVAL = "__arrival"
"""The sequence number of a view's row, in order of arrival."""
INGESTED = "__ingested"
"""When a row came in, if it was known from then on; null in a back-fill, whose rows were known when they happened."""
EVENT = "__event"
"""The event time of a row in microseconds, in the result of `newest_rows`."""

FEW_PAIRS = 4
"""Pairs per row of a view up to which comparing them beats sorting; they break even at 7 or 8 (measured)."""

_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class JoinedView:
    """A view in a join: the input `rows` has the column `__arrival`.

    `features` maps each feature to its name in the result. Without `created_time` a row is known at its event time.
    """

    rows: str
    keys: tuple[str, ...]
    event_time: str
    features: dict[str, str]
    created_time: str | None = None
    ttl: timedelta | None = None
    in_pairs: bool = False


def join(
    queries: QueryEngine,
    inputs: Mapping[str, ArrowInput],
    columns: Sequence[str],
    *,
    event_time: str,
    views: Sequence[JoinedView],
) -> ArrowTable:
    """Join `columns` of the input `spine` with the features of `views`, each by the plan that suits its rows."""
    planned = _planned(queries, inputs, views)
    sql = point_in_time_join("spine", columns, event_time=event_time, views=planned)
    return queries.select(sql, inputs)


def _planned(
    queries: QueryEngine, inputs: Mapping[str, ArrowInput], views: Sequence[JoinedView]
) -> list[JoinedView]:
    (counts,) = queries.select(pair_counts("spine", views), inputs).to_pylist()
    return [
        replace(view, in_pairs=counts[f"pairs{number}"] <= FEW_PAIRS * counts[f"rows{number}"])
        for number, view in enumerate(views)
    ]


def pair_counts(spine: str, views: Sequence[JoinedView]) -> str:
    """Select one row with `pairs0`, `rows0`, …: for each view, its rows and the pairs its plan in pairs compares."""
    counts = [f"({_counted(spine, view)}) AS counts{number}" for number, view in enumerate(views)]
    shown = [f"counts{n}.pairs AS pairs{n}, counts{n}.rows AS rows{n}" for n in range(len(views))]
    return f"SELECT {', '.join(shown)} FROM {', '.join(counts)}"  # noqa: S608 - names are quoted


def point_in_time_join(
    spine: str, columns: Sequence[str], *, event_time: str, views: Sequence[JoinedView]
) -> str:
    """Select every row of `spine` (an input with the column `__row`) in order, with the features of `views`."""
    keys = _list(dict.fromkeys(key for view in views for key in view.keys))
    steps = [
        f"s AS MATERIALIZED (SELECT {keys}, {ROW}, epoch_us({quoted(event_time)}) AS __at FROM {quoted(spine)})"  # noqa: S608 - names are quoted
    ]
    shown = [f"spine.{quoted(column)}" for column in columns]
    joins = []
    for number, view in enumerate(views):
        steps += [
            f"picked{number} AS MATERIALIZED ({(_best_of_pairs if view.in_pairs else _picked)(view)})",
            f"v{number} AS ({_fetched(view, number)})",
        ]
        shown += [f"v{number}.{quoted(name)} AS {quoted(alias)}" for name, alias in view.features.items()]
        joins.append(f"LEFT JOIN v{number} ON v{number}.{ROW} = spine.{ROW}")
    found = f"SELECT {', '.join(shown)} FROM {quoted(spine)} AS spine"  # noqa: S608 - names are quoted
    return "\n".join(["WITH", ",\n".join(steps), found, *joins, f"ORDER BY spine.{ROW}"])


def newest_rows(view: JoinedView, *, since: int) -> str:
    """Select the rows of every key of `view` that are the newest known at some moment from `since` (microseconds) on.

    A row is that from `__known` until the `__known` of the next one of its key; its event time is `__event`.
    """
    keys = _list(view.keys)
    known = " AND ".join(f"{quoted(key)} IS NOT NULL" for key in view.keys)
    chain = _newest_known(view, [*view.keys, *view.features])
    return (
        f"SELECT {keys}, {EVENT}, __known, {_list(view.features)} FROM ({chain}) WHERE {known}"  # noqa: S608
        f" QUALIFY coalesce(lead(__known) OVER (PARTITION BY {keys} ORDER BY __known) > {since}, true)"
    )


def created_column(view: StoredView) -> str | None:
    """Return the column that says when rows of `view` were known; none if that is their event time."""
    if view.known_at is KnownAt.INGESTION:
        return INGESTED
    return view.definition.created_time


def require_distinct_columns(view: FeatureView, keys: tuple[Feature, ...]) -> None:
    """Raise InvalidInput if columns of a view have the same name: a query would read one for the other."""
    moments = [view.event_time] + ([view.created_time] if view.created_time else [])
    for columns in (view.columns, view.features):
        if same := repeated_names([*(each.name for each in (*keys, *columns)), *moments]):
            raise InvalidInput.at(
                f"view {view.name}",
                given=", ".join(same),
                allowed="keys, time columns, columns and aggregations whose names differ by more than case",
                fix="rename all but one of them",
            )


def quoted(name: str) -> str:
    """Quote `name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _picked(view: JoinedView) -> str:
    """Select for every spine row the arrival of its view row, unless there is none or it exceeds the TTL."""
    return (
        f"SELECT s.{ROW}, r.{ARRIVAL} FROM s"  # noqa: S608 - names are quoted
        f" ASOF JOIN ({_newest_known(view, view.keys)}) r ON {_same_key(view)} AND s.__at >= r.__known"
        f" WHERE {_within_ttl(view)}"
    )


def _best_of_pairs(view: JoinedView) -> str:
    """Select the same by comparing all known rows of the key. If the newest exceeds the TTL, so do the others."""
    order = f"{{'event': r.{EVENT}, 'created': r.__created, 'arrival': r.{ARRIVAL}}}"
    return (
        f"SELECT s.{ROW}, max({order}).arrival AS {ARRIVAL} FROM s JOIN ({_timed(view, view.keys)}) r"  # noqa: S608
        f" ON {_same_key(view)} AND s.__at >= r.__known AND {_within_ttl(view)} GROUP BY s.{ROW}"
    )


def _counted(spine: str, view: JoinedView) -> str:
    keys = _list(view.keys)
    return (
        f"SELECT coalesce(sum(per_key.pairs), 0) AS pairs, count(*) AS rows FROM {quoted(view.rows)}"  # noqa: S608
        f" LEFT JOIN (SELECT {keys}, count(*) AS pairs FROM {quoted(spine)} GROUP BY {keys}) per_key USING ({keys})"
    )


def _same_key(view: JoinedView) -> str:
    return " AND ".join(f"s.{quoted(key)} = r.{quoted(key)}" for key in view.keys)


def _within_ttl(view: JoinedView) -> str:
    return "true" if view.ttl is None else f"s.__at - r.{EVENT} <= {view.ttl // _MICROSECOND}"


def _newest_known(view: JoinedView, columns: Iterable[str]) -> str:
    """Select `columns` of the rows that are the newest known at some time, from `__known` on; one per key and time.

    Rows of one event become known in the order of their created times, so comparing event times is enough.
    """
    keys = _list(view.keys)
    return (
        f"SELECT * FROM (SELECT *, max({EVENT}) OVER w AS __newest, lead(__known) OVER w AS __next"  # noqa: S608
        f" FROM ({_timed(view, columns)})"
        f" WINDOW w AS (PARTITION BY {keys} ORDER BY __known, {EVENT}, __created, {ARRIVAL}))"
        f" WHERE {EVENT} = __newest AND __next IS DISTINCT FROM __known"
    )


def _timed(view: JoinedView, columns: Iterable[str]) -> str:
    """Select the rows of `view` with their times as numbers. A row without a time never becomes known.

    The condition is an expression on purpose: on a bare column, the scan would filter and copy every batch.
    """
    event = f"epoch_us({quoted(view.event_time)})"
    created = f"epoch_us({quoted(view.created_time or view.event_time)})"
    if view.created_time == INGESTED:
        created = f"coalesce({created}, {event})"
    return (
        f"SELECT {_list(columns)}, {ARRIVAL}, {event} AS {EVENT},"  # noqa: S608 - names are quoted
        f" {created} AS __created, greatest({EVENT}, __created) AS __known"
        f" FROM {quoted(view.rows)} WHERE {event} + {created} IS NOT NULL"
    )


def _fetched(view: JoinedView, number: int) -> str:
    """Select the features of the picked rows."""
    features = ", ".join(f"r.{quoted(name)}" for name in view.features)
    return (
        f"SELECT p.{ROW}, {features} FROM {quoted(view.rows)} AS r"  # noqa: S608 - names are quoted
        f" JOIN picked{number} AS p ON r.{ARRIVAL} = p.{ARRIVAL}"
    )


def _list(names: Iterable[str]) -> str:
    return ", ".join(quoted(name) for name in names)
