"""`falaj config`: check falaj.toml, or show it with its defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from falaj.apps.cli.generation.typer_commands import group
from falaj.apps.cli.output.results import show as show_result
from falaj.apps.cli.session import Session
from falaj.assembly.config import read_config
from falaj.errors import InvalidInput
from falaj.records.places import default_home

FILE = Annotated[str | None, typer.Argument(metavar="FILE", help="A file instead of falaj.toml in the home.")]


def check(session: Session, file: FILE = None) -> None:
    """Check falaj.toml; report every fault with its line."""
    path = _path(session, file)
    config = read_config(path)
    if session.json:
        show_result({"file": str(path), "valid": True}, as_json=True)
    elif path.exists():
        print(f"{path} is valid: {len(config.zones)} zone(s), metadata on {config.metadata.driver}")
    else:
        print(f"there is no {path}; the defaults apply (falaj config show)")


def show(session: Session, file: FILE = None) -> None:
    """Print falaj.toml with the defaults of what it does not set; the result is a valid falaj.toml."""
    config = read_config(_path(session, file))
    if session.json:
        show_result(config, as_json=True)
    else:
        print("\n".join(toml_lines(config)))


def _path(session: Session, file: str | None) -> Path:
    """Return the file to read. No home is created."""
    if file is None:
        return (session.home or default_home()).absolute() / "falaj.toml"
    if not Path(file).is_file():
        raise InvalidInput.at("FILE", given=file, allowed="an existing TOML file")
    return Path(file)


Table = dict[str, Any] | BaseModel


def toml_lines(record: BaseModel) -> list[str]:
    """Return `record` as the lines of a TOML document; defaults are marked."""
    lines = list(_table(record, "", set_here=True))
    return lines[1:] if lines and not lines[0] else lines


def _table(table: Table, path: str, *, set_here: bool) -> Iterator[str]:
    """Yield the values of `table` under its heading, then the tables inside it."""
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
    """Return the values of a table: records stay records, other values are converted as for JSON."""
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


COMMANDS = {
    "config": partial(
        group, "config", "Check falaj.toml, or show it with its defaults.", {"check": check, "show": show}
    )
}
