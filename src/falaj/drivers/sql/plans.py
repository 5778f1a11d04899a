"""Statements that are compiled once, and then run on the driver's own connection (see decision 0004)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.compiler import SQLCompiler

Convert = Callable[[Any], Any] | None
"""How a value is converted for the driver, or from it; none if it stays as it is."""


class SelectPlan:
    """A SELECT as text for one kind of database, with the conversions that SQLAlchemy would make."""

    def __init__(self, query: sa.Select[Any], dialect: sa.Dialect) -> None:
        compiled = query.compile(dialect=dialect)
        assert isinstance(compiled, SQLCompiler)  # noqa: S101 - every SELECT gives one
        self.sql = str(compiled)
        self._order = compiled.positiontup
        self._given: Mapping[str, Any] = compiled.params
        self._convert: Mapping[str, Any] = compiled._bind_processors
        self._dialect = dialect
        self._columns = compiled._result_columns
        self._keys = [column.keyname for column in self._columns]
        self._results: list[tuple[int, Any]] | None = None

    def bound(self, parameters: Mapping[str, Any]) -> Any:
        """Return `parameters` as the driver binds them."""
        values = {**self._given, **parameters}
        for name, process in self._convert.items():
            if name in values:
                values[name] = process(values[name])
        return values if self._order is None else [values[name] for name in self._order]

    def rows(self, cursor: Any) -> list[dict[str, Any]]:
        """Return the rows that `cursor` has, by column."""
        if self._results is None:
            self._results = self._processors(cursor.description)
        keys, results = self._keys, self._results
        if not results:
            return [dict(zip(keys, values, strict=True)) for values in cursor]
        found = []
        for values in cursor:
            row = [*values]
            for at, process in results:
                row[at] = process(row[at])
            found.append(dict(zip(keys, row, strict=True)))
        return found

    def _processors(self, description: Any) -> list[tuple[int, Any]]:
        """Return the positions of columns that are converted, and how; some depend on what the database returns."""
        made = [
            column.type.dialect_impl(self._dialect).result_processor(self._dialect, described[1])
            for column, described in zip(self._columns, description, strict=True)
        ]
        return [(at, process) for at, process in enumerate(made) if process is not None]


@cache
def insert_plan(dialect: sa.Dialect, table: sa.Table, columns: tuple[str, ...]) -> tuple[str, list[Convert]]:
    """Return an INSERT into these columns, and how each value is bound."""
    missing = [column.name for column in table.c if column.default is not None and column.name not in columns]
    if missing:
        raise RuntimeError(f"{table.name} has defaults for {', '.join(missing)}: insert with execute")
    names = ", ".join(f'"{name}"' for name in columns)
    marks = ", ".join([_mark(dialect)] * len(columns))
    sql = f"INSERT INTO {table.name} ({names}) VALUES ({marks})"  # noqa: S608 - names of our own tables
    return sql, _converters(dialect, table, columns)


@cache
def update_plan(
    dialect: sa.Dialect, table: sa.Table, key: tuple[str, ...], columns: tuple[str, ...]
) -> tuple[str, list[Convert]]:
    """Return an UPDATE of these columns in the row with this key, and how each value is bound, the key's last."""
    if {*key} != {column.name for column in table.primary_key}:
        raise RuntimeError(f"{', '.join(key)} is not the primary key of {table.name}")
    mark = _mark(dialect)
    changed = ", ".join(f'"{name}" = {mark}' for name in columns)
    found = " AND ".join(f'"{name}" = {mark}' for name in key)
    sql = f"UPDATE {table.name} SET {changed} WHERE {found}"  # noqa: S608 - names of our own tables
    return sql, _converters(dialect, table, (*columns, *key))


def converted(convert: Iterable[Convert], values: Iterable[Any]) -> list[Any]:
    """Return `values` as the driver binds them."""
    both = zip(convert, values, strict=True)
    return [value if process is None else process(value) for process, value in both]


def _converters(dialect: sa.Dialect, table: sa.Table, columns: Iterable[str]) -> list[Convert]:
    return [table.c[name].type.dialect_impl(dialect).bind_processor(dialect) for name in columns]


def _mark(dialect: sa.Dialect) -> str:
    return "?" if dialect.paramstyle == "qmark" else "%s"
