"""Time-window aggregations as SQL: for each row of a view, aggregates over the window that ends with it."""

from __future__ import annotations

from datetime import timedelta

from falaj.features.joins import ARRIVAL, quoted
from falaj.records.features import AggregateFunction, Aggregation, StoredView

SQL_NAMES = {AggregateFunction.MEAN: "avg", AggregateFunction.STD: "stddev_samp"}

_MICROSECOND = timedelta(microseconds=1)


def aggregated_rows(view: StoredView, rows: str) -> str:
    """Select the keys, times and features of every row of the input `rows`.

    A window is (event - window, event]. Its created time is the latest created time of its rows, so that an
    aggregate is never visible before all of its inputs were known.
    """
    definition = view.definition
    keys = ", ".join(quoted(key.name) for key in view.keys)
    event = quoted(definition.event_time)
    found = [keys, event, ARRIVAL]
    if definition.created_time is not None:
        created = quoted(definition.created_time)
        longest = max(each.window for each in definition.aggregations)
        found.append(f"max({created}) OVER ({_window(keys, event, longest)}) AS {created}")
    found += [_feature(each, keys, event) for each in definition.aggregations]
    return f"SELECT {', '.join(found)} FROM {quoted(rows)}"  # noqa: S608 - names are quoted


def newest_windows(view: StoredView, rows: str) -> str:
    """Select the rows of the input `rows` that lie in the window of the newest row of each key."""
    keys = ", ".join(quoted(key.name) for key in view.keys)
    event = quoted(view.definition.event_time)
    longest = max(each.window for each in view.definition.aggregations) // _MICROSECOND
    newest = f"SELECT {keys}, max(epoch_us({event})) AS __newest FROM {quoted(rows)} GROUP BY {keys}"  # noqa: S608
    return (
        f"SELECT all_rows.* FROM {quoted(rows)} AS all_rows JOIN ({newest}) USING ({keys})"  # noqa: S608
        f" WHERE epoch_us({event}) > __newest - {longest}"
    )


def _feature(each: Aggregation, keys: str, event: str) -> str:
    function = SQL_NAMES.get(each.function, each.function.value)
    value = f"{function}({quoted(each.column)}) OVER ({_window(keys, event, each.window)})"
    kind = "BIGINT" if each.function is AggregateFunction.COUNT else "DOUBLE"
    return f"CAST({value} AS {kind}) AS {quoted(each.name)}"


def _window(keys: str, event: str, length: timedelta) -> str:
    before = length // _MICROSECOND - 1
    return f"PARTITION BY {keys} ORDER BY epoch_us({event}) RANGE BETWEEN {before} PRECEDING AND CURRENT ROW"
