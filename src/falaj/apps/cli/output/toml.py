"""A record as TOML; what was not set but is a default says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

Table = dict[str, Any] | BaseModel


def toml_lines(record: BaseModel) -> list[str]:
    """`record` as the lines of a TOML document."""
    lines = list(_table(record, "", set_here=True))
    return lines[1:] if lines and not lines[0] else lines


def _table(table: Table, path: str, *, set_here: bool) -> Iterator[str]:
    """The values of `table` under its heading, then the tables inside it."""
    fields = _fields(table)
    plain = {name: value for name, value in fields.items() if not _is_table(value)}
    if path and plain:
        yield from ("", f"[{path}]")
    for name, value in plain.items():
        yield from _entry(name, value, is_set=set_here and _is_set(table, name))
    for name, value in fields.items():
        if _is_table(value):
            inner = f"{path}.{_key(name)}" if path else _key(name)
            yield from _table(value, inner, set_here=set_here and _is_set(table, name))


def _entry(name: str, value: Any, *, is_set: bool) -> Iterator[str]:
    if value is None:
        yield f"# {_key(name)} is not set"
    else:
        yield f"{_key(name)} = {_value(value)}" + ("" if is_set else "  # default")


def _fields(table: Table) -> dict[str, Any]:
    """The values of a table: records stay records, all else is as JSON has it."""
    if isinstance(table, dict):
        return table
    plain = table.model_dump(mode="json")
    inner = {name: getattr(table, name) for name in type(table).model_fields}
    return {name: value if _is_table(value) else plain[name] for name, value in inner.items()}


def _is_table(value: Any) -> bool:
    return isinstance(value, dict | BaseModel)


def _is_set(table: Table, name: str) -> bool:
    return not isinstance(table, BaseModel) or name in table.model_fields_set


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return json.dumps(value)  # a JSON string, number or boolean is a TOML one


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else json.dumps(name)
