"""The result of a command on stdout: JSON, or whatever is easiest to read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json

from falaj.apps.cli.output.tables import heading, show_fields, show_table, show_text
from falaj.apps.cli.output.values import format_value
from falaj.records.governance.objects import Page

T = TypeVar("T")

DOCUMENTS = {"InclusionProof", "PolicySchema"}
"""Records that other programs read: they are JSON whether or not it is asked for."""


def show(result: Any, *, as_json: bool) -> None:
    """A record, a page of records, or a tuple of them."""
    if as_json or type(result).__name__ in DOCUMENTS:
        print(to_json(result, indent=2).decode())
    elif isinstance(result, Page):
        show_records(result.items)
    elif isinstance(result, BaseModel):
        show_record(result)
    elif isinstance(result, tuple | list):
        show_records(result)
    elif result is not None:
        print(format_value(result))


def show_json_lines(records: Iterable[Any]) -> None:
    """A stream of records, one JSON document per line, each as soon as it is there."""
    for record in records:
        print(to_json(record).decode(), flush=True)


def show_changes(changes: Iterable[T], describe: Callable[[T], str], *, as_json: bool) -> T | None:
    """Each change in a line, and none twice: the platform also says now and then that nothing has changed."""
    last, told = None, ""
    for last in changes:
        line = to_json(last).decode() if as_json else describe(last)
        if line != told:
            print(line, flush=True)
        told = line
    return last


def show_records(records: Iterable[Any]) -> None:
    """Records below each other."""
    found = list(records)
    if not found:
        print("none", file=sys.stderr)
    elif all(isinstance(record, BaseModel) for record in found):
        show_table(found)
    else:
        print("\n".join(format_value(record) for record in found))


def show_record(record: BaseModel) -> None:
    """The short fields first, then what takes more room: text, and records inside the record."""
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
        _show_long(value)


def _is_long(value: Any) -> bool:
    if isinstance(value, str):
        return "\n" in value
    if isinstance(value, BaseModel):
        return "name" not in type(value).model_fields and type(value).__name__ != "Label"
    return isinstance(value, tuple) and len(value) > 0 and isinstance(value[0], BaseModel)


def _show_long(value: Any) -> None:
    if isinstance(value, str):
        show_text(value)
    elif isinstance(value, BaseModel):
        show_record(value)
    else:
        show_table(value)
