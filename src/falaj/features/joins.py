"""Point-in-time joins as SQL: for every row of a spine, what was known of its entity at its time.

A row of a view is *known* from the later of its event time and its created time on. Of the known rows, the one with the
newest event counts, ties going to the later created time and then to the later arrival. Two plans find it:

- in order: a row that becomes known after a newer event did never counts; without those rows, the one that counts is
  the last that became known, which ASOF JOIN finds in one pass over sorted rows, however many there are of a key;
- in pairs: every row of the spine beside every row of its key. Nothing is sorted, so it takes half the time where keys
  have few rows, and far too long where they have many: `pair_counts` tells.

Either way only keys and moments are read for that; the features of the rows found are fetched last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

ROW = "__row"
"""The number of a spine row, by which the result is ordered."""
ARRIVAL = "__arrival"
"""The number of a view's row, its own, growing as rows arrive."""
EVENT = "__event"
"""The event time of a row in microseconds, as `newest_rows` gives it."""

_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class JoinedView:
    """A view in a join: the input `rows`, which has the column `__arrival`.

    `features` says what each feature is called in the result. Without `created_time` a row is known when it happened.
    """

    rows: str
    keys: tuple[str, ...]
    event_time: str
    features: dict[str, str]
    created_time: str | None = None
    ttl: timedelta | None = None
    in_pairs: bool = False


def pair_counts(spine: str, views: Sequence[JoinedView]) -> str:
    """One row: for each of `views`, as `pairs0`, `rows0` and so on, what its plan in pairs would look at."""
    counts = [f"({_counted(spine, view)}) AS counts{number}" for number, view in enumerate(views)]
    shown = [f"counts{n}.pairs AS pairs{n}, counts{n}.rows AS rows{n}" for n in range(len(views))]
    return f"SELECT {', '.join(shown)} FROM {', '.join(counts)}"  # noqa: S608 - names are quoted


def point_in_time_join(
    spine: str, columns: Sequence[str], *, event_time: str, views: Sequence[JoinedView]
) -> str:
    """Every row of `spine` (an input with the column `__row`), in its order, with the features of `views`."""
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


def newest_rows(view: JoinedView) -> str:
    """The row of every key of `view` that counts once everything is known; its event time is `__event`."""
    keys = _list(view.keys)
    order = ", ".join(f"{column} DESC" for column in (EVENT, "__created", ARRIVAL))
    known = " AND ".join(f"{quoted(key)} IS NOT NULL" for key in view.keys)
    return (
        f"SELECT {keys}, {EVENT}, {_list(view.features)} FROM ({_timed(view, [*view.keys, *view.features])})"  # noqa: S608
        f" WHERE {known} QUALIFY row_number() OVER (PARTITION BY {keys} ORDER BY {order}) = 1"
    )


def quoted(name: str) -> str:
    """`name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _picked(view: JoinedView) -> str:
    """For every spine row, the arrival of the row that counts, where there is one and it is not too old."""
    return (
        f"SELECT s.{ROW}, r.{ARRIVAL} FROM s"  # noqa: S608 - names are quoted
        f" ASOF JOIN ({_counting(view)}) r ON {_same(view)} AND s.__at >= r.__known WHERE {_young(view)}"
    )


def _best_of_pairs(view: JoinedView) -> str:
    """The same, by comparing all the known rows of the key. If the newest is too old, so are the others."""
    order = f"{{'event': r.{EVENT}, 'created': r.__created, 'arrival': r.{ARRIVAL}}}"
    return (
        f"SELECT s.{ROW}, max({order}).arrival AS {ARRIVAL} FROM s JOIN ({_timed(view, view.keys)}) r"  # noqa: S608
        f" ON {_same(view)} AND s.__at >= r.__known AND {_young(view)} GROUP BY s.{ROW}"
    )


def _counted(spine: str, view: JoinedView) -> str:
    keys = _list(view.keys)
    return (
        f"SELECT coalesce(sum(per_key.pairs), 0) AS pairs, count(*) AS rows FROM {quoted(view.rows)}"  # noqa: S608
        f" LEFT JOIN (SELECT {keys}, count(*) AS pairs FROM {quoted(spine)} GROUP BY {keys}) per_key USING ({keys})"
    )


def _same(view: JoinedView) -> str:
    return " AND ".join(f"s.{quoted(key)} = r.{quoted(key)}" for key in view.keys)


def _young(view: JoinedView) -> str:
    return "true" if view.ttl is None else f"s.__at - r.{EVENT} <= {view.ttl // _MICROSECOND}"


def _counting(view: JoinedView) -> str:
    """The rows of `view` that count for a while, each from `__known` on; one per key and moment.

    Rows of one event become known in the order of their created times, so the newest event is enough to compare.
    """
    keys = _list(view.keys)
    return (
        f"SELECT * FROM (SELECT *, max({EVENT}) OVER w AS __newest, lead(__known) OVER w AS __next"  # noqa: S608
        f" FROM ({_timed(view, view.keys)})"
        f" WINDOW w AS (PARTITION BY {keys} ORDER BY __known, {EVENT}, __created, {ARRIVAL}))"
        f" WHERE {EVENT} = __newest AND __next IS DISTINCT FROM __known"
    )


def _timed(view: JoinedView, columns: Iterable[str]) -> str:
    """The rows of `view` with their moments as numbers. A row without one never becomes known.

    The condition is an expression on purpose: on a bare column, the scan would filter and copy every batch.
    """
    event, created = quoted(view.event_time), quoted(view.created_time or view.event_time)
    return (
        f"SELECT {_list(columns)}, {ARRIVAL}, epoch_us({event}) AS {EVENT},"  # noqa: S608 - names are quoted
        f" epoch_us({created}) AS __created, greatest({EVENT}, __created) AS __known"
        f" FROM {quoted(view.rows)} WHERE epoch_us({event}) + epoch_us({created}) IS NOT NULL"
    )


def _fetched(view: JoinedView, number: int) -> str:
    """The features of the rows that were picked."""
    features = ", ".join(f"r.{quoted(name)}" for name in view.features)
    return (
        f"SELECT p.{ROW}, {features} FROM {quoted(view.rows)} AS r"  # noqa: S608 - names are quoted
        f" JOIN picked{number} AS p ON r.{ARRIVAL} = p.{ARRIVAL}"
    )


def _list(names: Iterable[str]) -> str:
    return ", ".join(quoted(name) for name in names)
