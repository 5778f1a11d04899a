"""Carries out a point-in-time join, each view by the plan that suits its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from falaj.features.joins import JoinedView, pair_counts, point_in_time_join
from falaj.ports.queries import ArrowInput, ArrowTable, QueryEngine

FEW_PAIRS = 4
"""Pairs per row of a view up to which comparing them beats sorting: measured, they break even at 7 or 8."""


def join(
    queries: QueryEngine,
    inputs: Mapping[str, ArrowInput],
    columns: Sequence[str],
    *,
    event_time: str,
    views: Sequence[JoinedView],
) -> ArrowTable:
    """The `columns` of the input `spine` with the features of `views`, row by row."""
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
