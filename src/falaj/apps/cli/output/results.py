"""Prints the result of a command on stdout: as JSON, or as a table, a list of fields or text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json

from falaj.apps.cli.output.tables import Columns, heading, show_fields, show_table, show_text
from falaj.apps.cli.output.values import format_value
from falaj.records.governance.objects import Page

T = TypeVar("T")

INFINITIES: Literal["strings"] = "strings"
"""JSON has no infinities and no NaN: outside of records, which have their own rules, they are texts."""

DOCUMENTS = {"InclusionProof", "PolicySchema"}
"""Records for other programs: they are printed as JSON with or without --json."""


def show(result: Any, *, as_json: bool, columns: Columns | None = None) -> None:
    """Print a record, a page of records, or a sequence of them."""
    if as_json or type(result).__name__ in DOCUMENTS:
        print(to_json(result, indent=2, inf_nan_mode=INFINITIES).decode())
    elif isinstance(result, Page):
        show_records(result.items, columns)
    elif isinstance(result, BaseModel):
        show_record(result, columns)
    elif isinstance(result, tuple | list):
        show_records(result, columns)
    elif result is not None:
        print(format_value(result))


def show_json_lines(records: Iterable[Any]) -> None:
    """Print a stream of records, one JSON document per line, each as soon as it arrives."""
    for record in records:
        print(to_json(record, inf_nan_mode=INFINITIES).decode(), flush=True)


def show_changes(changes: Iterable[T], describe: Callable[[T], str], *, as_json: bool) -> T | None:
    """Print each change on a line, without repeats (the stream also repeats the last state now and then)."""
    last, printed = None, ""
    for last in changes:
        line = to_json(last).decode() if as_json else describe(last)
        if line != printed:
            print(line, flush=True)
        printed = line
    return last


def show_records(records: Iterable[Any], columns: Columns | None = None) -> None:
    """Print records as a table, other values one a line."""
    found = list(records)
    if not found:
        print("none", file=sys.stderr)
    elif all(isinstance(record, BaseModel) for record in found):
        show_table(found, columns)
    else:
        print("\n".join(format_value(record) for record in found))


def show_record(record: BaseModel, columns: Columns | None = None) -> None:
    """Print the short fields first, then the long ones: text of several lines, and records inside the record."""
    short: dict[str, str] = {}
    long: list[tuple[str, Any]] = []
    for name in type(record).model_fields:
        value = getattr(record, name)
        if _is_long(value):
            long.append((name, value))
        else:
            short[heading(name)] = format_value(value, name)
    if short:
        show_fields(short)
    for name, value in long:
        if short or len(long) > 1:
            print(f"\n{heading(name)}")
        _show_long(value, columns)


def _is_long(value: Any) -> bool:
    if isinstance(value, str):
        return "\n" in value
    if isinstance(value, BaseModel):
        return "name" not in type(value).model_fields and type(value).__name__ != "Label"
    return isinstance(value, tuple) and len(value) > 0 and isinstance(value[0], BaseModel)


def _show_long(value: Any, columns: Columns | None) -> None:
    if isinstance(value, str):
        show_text(value)
    elif isinstance(value, BaseModel):
        show_record(value, columns)
    else:
        show_table(value, columns)
