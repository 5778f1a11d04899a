"""Typical values of columns, which endpoints take for features that have no value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from falaj.features import store
from falaj.features.backends import FeatureBackends
from falaj.features.joins import quoted
from falaj.features.views import feature_rows, pinned_rows
from falaj.ports.metadata import Transaction
from falaj.ports.queries import ArrowInput, QueryEngine
from falaj.records.expressions.types import BOOLEAN, FLOAT, NUMERIC
from falaj.records.features import ColumnType, TrainingSet
from falaj.records.governance.objects import StoredObject

FEW_VALUES = 20
"""Up to so many different whole numbers are taken as classes: their most frequent one is typical."""


class TrainingStatistics:
    """Training sets, and the typical values of their columns and of those of views."""

    def __init__(self, backends: FeatureBackends) -> None:
        self._backends = backends

    def training_set(self, tx: Transaction, found: StoredObject, /) -> TrainingSet:
        return store.load_training_set(tx, found)

    def typical_values(self, found: StoredObject, columns: Sequence[str], /) -> dict[str, float]:
        """Return a typical value of each of the columns of a training set or view that has any.

        It is the mean of floats, the most frequent of booleans and of a few different whole numbers, and the median of
        many. Values that are not finite do not count.
        """
        from falaj.features.request_time import training_columns

        with self._backends.leased() as (backends, memory):
            with backends.gate.database.read() as tx:
                view = store.load_view(tx, found) if found.kind == "view" else None
                made = store.load_training_set(tx, found) if found.kind == "dataset" else None
            if made is not None:
                table = store.training_table(made.workspace, made.id)
                rows = pinned_rows(backends, made.zone, table, made.table_version)
            elif view is not None and view.table_version is not None:
                rows = feature_rows(backends, view, memory=memory)
            else:
                return {}
            kinds = training_columns.column_types(rows)
            values = {
                column: _typical(backends.queries, rows, column, kinds[column])
                for column in columns
                if kinds.get(column) in NUMERIC
            }
        return {column: float(value) for column, value in values.items() if value is not None}


def _typical(queries: QueryEngine, rows: ArrowInput, column: str, kind: ColumnType) -> Any:
    name = quoted(column)
    if kind is FLOAT:
        finite = f"SELECT {name}::DOUBLE AS v FROM rows WHERE isfinite({name}::DOUBLE)"  # noqa: S608 - quoted
        sql = f"SELECT avg(v) AS mean, median(v) AS middle FROM ({finite})"  # noqa: S608 - quoted
        (found,) = queries.select(sql, {"rows": rows}).to_pylist()
        mean = found["mean"]
        return mean if mean is not None and abs(mean) < float("inf") else found["middle"]
    known = f"SELECT {name} AS v, count(*) AS n FROM rows WHERE {name} IS NOT NULL GROUP BY 1"  # noqa: S608 - quoted
    sql = f"SELECT v FROM ({known}) QUALIFY count(*) OVER () <= {FEW_VALUES} ORDER BY n DESC, v LIMIT 1"  # noqa: S608
    few = queries.select(sql, {"rows": rows}).to_pylist()
    if few or kind is BOOLEAN:
        return few[0]["v"] if few else None
    sql = f"SELECT quantile_disc({name}, 0.5) AS v FROM rows"  # noqa: S608 - quoted
    (found,) = queries.select(sql, {"rows": rows}).to_pylist()
    return found["v"]
