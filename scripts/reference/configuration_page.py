"""The table of settings in docs/reference/configuration.md; the text around it is written by hand."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from datetime import timedelta
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic.fields import FieldInfo

from falaj.records.config import Config
from falaj.records.names import Secret
from falaj.records.record import Record
from falaj.records.sizes import spell_size
from reference.markdown import COMMAND, code, field_docs, table

BEGIN, END = f"<!-- settings: begin, written by `{COMMAND}` -->", "<!-- settings: end -->"
SECRET = '`"env:NAME"` or `"file:PATH"`'
WORDS = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    timedelta: "duration",
    Path: "path",
} | {IPv4Network: "network"}


class Setting(NamedTuple):
    """A row of the table."""

    name: str
    type: str
    default: str
    meaning: str


def with_settings(page: str) -> str:
    """Return the page with the table of every setting of falaj.toml between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    rows = [(code(row.name), row.type, row.default, row.meaning) for row in settings(Config)]
    return f"{head}{BEGIN}\n{table(('setting', 'type', 'default', 'meaning'), rows)}\n{END}{tail}"


def settings(kind: type[Record], prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a section, with those of the sections inside it. Each needs its meaning below it."""
    docs = field_docs(kind)
    for name, field in kind.model_fields.items():
        full, inner = f"{prefix}{name}", _records(field.annotation)
        if name in docs:
            yield Setting(full, _type(field), _default(field), docs[name])
        elif not inner:
            raise SystemExit(f"{kind.__name__}.{name} has no text below it that says what it means")
        below = f"{full}.NAME." if typing.get_origin(field.annotation) is dict else f"{full}."
        yield from settings(inner[0], below) if len(inner) == 1 else _by_driver(inner, below)


def _by_driver(kinds: list[type[Record]], prefix: str) -> Iterator[Setting]:
    """Yield the settings of a section that depends on its driver, of which the first is the default."""
    drivers = [str(typing.get_args(kind.model_fields["driver"].annotation)[0]) for kind in kinds]
    for kind, driver in zip(kinds, drivers, strict=True):
        docs = field_docs(kind)
        if kind is kinds[0]:
            values = " | ".join(f'`"{each}"`' for each in drivers)
            yield Setting(f"{prefix}driver", values, f'`"{driver}"`', docs["driver"])
        for name, field in kind.model_fields.items():
            if name != "driver":
                yield Setting(f"{prefix}{name}", _type(field), _default(field), f"{driver}: {docs[name]}")


def _records(annotation: Any) -> list[type[Record]]:
    """Return the sections that a setting holds."""
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return [annotation]
    return [kind for inner in typing.get_args(annotation) for kind in _records(inner)]


def _type(field: FieldInfo) -> str:
    if _is_spelled(field, "_size"):
        return "size"
    if any(_is_secret(each) for each in field.metadata):
        return SECRET
    low = next((each.ge for each in field.metadata if hasattr(each, "ge")), None)
    high = next((each.le for each in field.metadata if hasattr(each, "le")), None)
    bounds = f", {_spelled(field, low)} to {_spelled(field, high)}" if high is not None else ""
    return _word(field.annotation) + bounds


def _word(annotation: Any) -> str:
    """Return the type of a value in TOML."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return SECRET if any(_is_secret(each) for each in inner[1:]) else _word(inner[0])
    if origin is Literal:
        return " | ".join(f'`"{each}"`' for each in inner)
    if origin is tuple:
        return f"list of {_word(inner[0])}s"
    if origin is dict or _records(annotation):
        return "table"
    if inner:
        return _word(inner[0])  # the rest is None
    return WORDS[annotation]


def _is_secret(mark: object) -> bool:
    return any(mark is each for each in typing.get_args(Secret)[1:])


def _default(field: FieldInfo) -> str:
    default = field.default
    if field.is_required():
        return "required"
    if default is None or _records(field.annotation):
        return "–"
    return code(_spelled(field, default))


def _spelled(field: FieldInfo, value: Any) -> str:
    """Return a value as it would be written in falaj.toml."""
    if isinstance(value, timedelta):
        return f'"{_duration(value, is_iso=not _is_spelled(field, "_length"))}"'
    if _is_spelled(field, "_size"):
        return f'"{spell_size(value)}"'
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str)


def _duration(value: timedelta, *, is_iso: bool) -> str:
    seconds = value.total_seconds()
    if is_iso:
        return f"PT{seconds:g}S"
    units = (("d", 86_400), ("h", 3600), ("m", 60))
    fitting = (f"{seconds / size:g}{unit}" for unit, size in units if seconds and not seconds % size)
    return next(fitting, f"{seconds:g}s")


def _is_spelled(field: FieldInfo, reader: str) -> bool:
    """Return whether a function of records/config.py reads the setting as people write it."""
    return any(
        getattr(getattr(each, "func", None), "__name__", "") == reader
        for each in (*field.metadata, *_nested_metadata(field.annotation))
    )


def _nested_metadata(annotation: Any) -> Iterator[Any]:
    """Return the metadata inside a type, such as that of an optional size."""
    yield from getattr(annotation, "__metadata__", ())
    for inner in typing.get_args(annotation):
        yield from _nested_metadata(inner)
