"""Reads definitions in TOML: `[[entity]]`, `[[view]]` and `[[view.aggregation]]` tables, faults with their lines."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from falaj.errors import Fault, shorten
from falaj.records import durations
from falaj.records.durations import read_duration
from falaj.records.features import Aggregation, ColumnType, Entity, FeatureView
from falaj.sdk.definition_files.toml_lines import Location, TomlLines

ALLOWED = {
    "entity": tuple(Entity.model_fields),
    "view": (*(name for name in FeatureView.model_fields if name != "aggregations"), "aggregation", "source"),
    "aggregation": tuple(Aggregation.model_fields),
}
EXAMPLES = {
    "columns": 'columns = {km = "float"}',
    "entities": 'entities = ["driver"]',
    "function": 'function = "mean"',
    "ttl": 'ttl = "7d"',
    "window": 'window = "7d"',
}
Found = tuple[Entity | FeatureView, str, Path | None]


def read_toml(path: Path, faults: list[Fault]) -> Iterator[Found]:
    """Yield the records of the file, each with its location and source; append what is wrong to `faults`."""
    try:
        text = path.read_text()
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        where = f"{path}:{line[1]}" if line else str(path)
        faults.append(Fault(where=where, given=str(error), allowed="TOML in UTF-8"))
        return
    yield from _File(path, TomlLines(text), faults).records(tables)


class _File:
    """The reader of one file."""

    def __init__(self, path: Path, lines: TomlLines, faults: list[Fault]) -> None:
        self._path = path
        self._lines = lines
        self._faults = faults

    def records(self, tables: dict[str, Any]) -> Iterator[Found]:
        for name in tables:
            if name not in ("entity", "view"):
                self._unknown((name,), name, ("entity", "view"))
        for number, given in enumerate(self._array(tables, "entity", ())):
            at: Location = ("entity", number)
            self._known(at, given, "entity")
            if isinstance(given.get("name"), str):
                given.setdefault("key", given["name"])
            if (entity := self._made(Entity, given, at)) is not None:
                yield entity, self._where(at), None
        for number, given in enumerate(self._array(tables, "view", ())):
            at = ("view", number)
            self._known(at, given, "view")
            source = self._source(given, at)
            if (view := self._made(FeatureView, self._view(given, at), at)) is not None:
                yield view, self._where(at), source

    def _array(self, table: dict[str, Any], name: str, at: Location) -> list[dict[str, Any]]:
        found = table.get(name, [])
        if isinstance(found, list) and all(isinstance(each, dict) for each in found):
            return [dict(each) for each in found]
        path = ".".join([*(str(part) for part in at if isinstance(part, str)), name])
        self._add((*at, name), given=found, allowed=f"tables, each under [[{path}]]", fix=f"[[{path}]]")
        return []

    def _view(self, given: dict[str, Any], at: Location) -> dict[str, Any]:
        """The table of a view in the form of its record."""
        made = {name: value for name, value in given.items() if name not in ("aggregation", "source")}
        for name in ("ttl", "max_ahead", "freshness"):
            self._duration(made, name, at)
        if isinstance(columns := made.get("columns"), Mapping):
            made["columns"] = [
                {"name": name, **(kind if isinstance(kind, Mapping) else {"type": kind})}
                for name, kind in columns.items()
            ]
        aggregations = self._array(given, "aggregation", at)
        for number, each in enumerate(aggregations):
            self._known((*at, "aggregation", number), each, "aggregation")
            self._duration(each, "window", (*at, "aggregation", number))
        return made | {"aggregations": aggregations}

    def _duration(self, table: dict[str, Any], name: str, at: Location) -> None:
        if name not in table:
            return
        found = read_duration(table[name])
        if found:
            table[name] = found
        else:
            self._add((*at, name), given=table[name], allowed=durations.RULE)
            table[name] = timedelta(days=1)  # said already

    def _source(self, given: dict[str, Any], at: Location) -> Path | None:
        named = given.get("source")
        if named is None:
            return None
        if not isinstance(named, str) or not (self._path.parent / named).is_file():
            self._add((*at, "source"), given=named, allowed=f"a file, seen from {self._path.parent}")
            return None
        return self._path.parent / named

    def _known(self, at: Location, given: dict[str, Any], kind: str) -> None:
        for name in [name for name in given if name not in ALLOWED[kind]]:
            self._unknown((*at, name), name, ALLOWED[kind])
            del given[name]

    def _unknown(self, at: Location, name: str, allowed: tuple[str, ...]) -> None:
        close = difflib.get_close_matches(name, allowed, n=1)
        fix = f"did you mean {close[0]}?" if close else "remove it"
        self._add(at, given=name, allowed=", ".join(allowed), fix=fix)

    def _made(self, kind: type[Any], given: dict[str, Any], at: Location) -> Any:
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            for fault in _telling(error.errors(include_url=False, include_context=False)):
                self._add(
                    (*at, *_in_file(fault["loc"], given)),
                    given=None if fault["type"] == "missing" else fault["input"],
                    allowed=_words(fault),
                )
            return None

    def _add(self, at: Location, *, given: object, allowed: str, fix: str | None = None) -> None:
        shown = None if given is None or isinstance(given, Mapping) else shorten(given)
        fix = fix or EXAMPLES.get(str(at[-1]))
        self._faults.append(Fault(where=self._where(at), given=shown, allowed=allowed, fix=fix))

    def _where(self, at: Location) -> str:
        dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).lstrip(".")
        return f"{self._path}:{self._lines.line(at)} {dotted}"


def _in_file(location: Location, given: dict[str, Any]) -> Location:
    """Return the location of a record's field in the file."""
    if location[:1] == ("aggregations",):
        return ("aggregation", *location[1:])
    columns = given.get("columns")
    if location[:1] == ("columns",) and len(location) > 1 and isinstance(columns, list):
        number = location[1]
        name = (
            columns[number].get("name")
            if isinstance(number, int) and isinstance(columns[number], dict)
            else None
        )
        return ("columns", name) if isinstance(name, str) else location
    return location


def _telling(faults: list[Any]) -> list[Any]:
    """Return the faults without consequential ones: a list is too short when its items are invalid."""
    inner = {fault["loc"][:1] for fault in faults if len(fault["loc"]) > 1}
    return [fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in inner]


def _words(fault: Any) -> str:
    if fault["type"] == "too_short":
        return "one at least"
    if fault["type"] == "missing":
        return "a value"
    if fault["type"] == "enum" and fault["loc"][-1] == "type":
        return ", ".join(ColumnType)
    return str(fault["msg"]).removeprefix("Value error, ")
