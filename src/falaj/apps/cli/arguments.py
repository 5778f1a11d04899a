"""The parameters of an operation on the command line: how they are spelled, and what was typed for them.

What is typed stays text as far as it can: the operation's own check says what is wrong with it.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from pydantic import BaseModel

from falaj.apps.cli.values import duration
from falaj.errors import Fault, InvalidInput
from falaj.governance.operations import Operation
from falaj.records.names import PlacedIn, RefersTo

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
DURATION_RULE = "a number followed by s, m, h or d"

HELP = {
    "after": "Go on behind this cursor.",
    "before": "Go on before this entry.",
    "limit": "At most so many.",
    "only": "Allow these jurisdictions only, such as AE.",
    "classes": "Classes of the data, such as personal.",
    "sources": "What the bytes came from: an id, or kind:name.",
    "expires_in": "How long it holds.",
    "older_than": "Leave what is younger.",
    "first": "Begin with this entry.",
    "seq": "The number of the entry.",
    "action": "An action, such as blob.read.",
    "actions": "What it may do, such as blob.read or blob.*",
    "purpose": "What it is for; it stands in the list of tokens.",
    "name": "1 to 128 of a-z, 0-9, '-', '_' and '.'",
    "kind": "What kind it is.",
    "role": "Which role.",
    "depth": "At most so many steps away.",
    "direction": "What it came from, what came from it, or both.",
    "outcome": "How it ended.",
    "caller": "Who did it.",
    "offset": "Begin at this byte.",
    "length": "At most so many bytes.",
    "text": "The policy in Cedar.",
}


EXAMPLES = {
    "actions": "blob.read",
    "classes": "personal",
    "expires_in": "30d",
    "limit": "100",
    "only": "AE",
    "sources": "blob:NAME",
}

REFERENCES = {
    "user": "A user or service account",
    "subject": "A user, service account or group",
}
ANYTHING = "An id, or kind:name."


class Typed(NamedTuple):
    """How one parameter is typed."""

    name: str
    spelled: str
    word: str
    kind: Literal["text", "flag", "duration", "json", "file"]
    repeated: bool
    choices: tuple[str, ...]


def typed_parameters(operation: Operation) -> dict[str, Typed]:
    """Every parameter of `operation`, as it is typed."""
    return {name: _typed(operation, name) for name in operation.parameters}


def signature(operation: Operation) -> list[inspect.Parameter]:
    """The parameters for typer: text, lists of text and flags only."""
    return [_for_typer(typed, operation) for typed in typed_parameters(operation).values()]


def gather(operation: Operation, typed: Mapping[str, Any]) -> dict[str, Any]:
    """What was typed, as the operation's input; what was not typed is left out."""
    given: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, how in typed_parameters(operation).items():
        value = typed.get(name)
        if value is None or value == []:
            continue
        try:
            items = [item for part in value for item in _split(part, how)] if how.repeated else [value]
            read = [_read(item, how) for item in items]
            given[name] = read if how.repeated else read[0]
        except InvalidInput as error:
            faults += error.faults
    if faults:
        raise InvalidInput(_not_valid(_command(operation), faults), faults=faults)
    return given


def check(
    operation: Operation,
    given: Mapping[str, Any],
    *,
    command: str | None = None,
    spelling: Mapping[str, str] | None = None,
) -> None:
    """The operation's own check of its input, with its faults named as they are typed.

    A `command` that is written by hand may have a `spelling` of its own.
    """
    try:
        operation.check(given)
    except InvalidInput as error:
        spelled = {name: how.spelled for name, how in typed_parameters(operation).items()} | dict(
            spelling or {}
        )
        faults = [_as_typed(fault, given, spelled) for fault in error.faults]
        raise type(error)(_not_valid(command or _command(operation), faults), faults=faults) from None


def _as_typed(fault: Fault, given: Mapping[str, Any], spelled: Mapping[str, str]) -> Fault:
    name = fault.where.partition(".")[0]
    value, where = given.get(name), spelled.get(name, fault.where)
    changes: dict[str, str] = {"where": where}
    if isinstance(value, timedelta):
        changes["given"] = duration(value)
    if fault.fix is None and name in EXAMPLES:
        changes["fix"] = f"{where} {EXAMPLES[name]}"
    return fault.model_copy(update=changes)


def _command(operation: Operation) -> str:
    return f"{operation.room} {operation.verb.replace('_', '-')}"


def _not_valid(command: str, faults: Sequence[Fault]) -> str:
    what = f"{faults[0].where} is" if len(faults) == 1 else f"{len(faults)} things are"
    return f"falaj {command}: {what} not valid"


def retype(operation: Operation, given: Mapping[str, Any], **changed: str) -> str:
    """The command line, without `falaj`, that gives `given` again, but for what is `changed`."""
    words = [_command(operation)]
    for name, how in typed_parameters(operation).items():
        value = changed.get(name, given.get(name))
        for item in value if how.repeated and value else [value]:
            if item is not None:
                option = [how.spelled] if how.spelled.startswith("-") else []
                words += [*option, shlex.quote(str(item))]
    return " ".join(words)


def _typed(operation: Operation, name: str) -> Typed:
    parameter = operation.parameters[name]
    plain = _plain(parameter.annotation)
    repeated = typing.get_origin(plain) is tuple
    item = _plain(typing.get_args(plain)[0]) if repeated else plain
    kind: Literal["text", "flag", "duration", "json", "file"] = "text"
    if name == operation.upload:
        kind = "file"
    elif item is bool:
        kind = "flag"
    elif item is timedelta:
        kind = "duration"
    elif item is dict or typing.get_origin(item) is dict or _is_record(item):
        kind = "json"
    one = _singular(name) if repeated else name
    word = "FILE" if kind == "file" else one.upper()
    spelled = f"--{one.replace('_', '-')}" if parameter.kind is parameter.KEYWORD_ONLY else word
    return Typed(name, spelled, word, kind, repeated, _choices(item))


def _for_typer(how: Typed, operation: Operation) -> inspect.Parameter:
    parameter = operation.parameters[how.name]
    required = parameter.default is parameter.empty
    settings: dict[str, Any] = {"metavar": how.word, "help": _help(how, parameter)}
    if how.choices:
        settings["autocompletion"] = lambda: list(how.choices)
    plain: Any = bool if how.kind == "flag" else list[str] if how.repeated else str
    if how.spelled.startswith("-"):
        name = how.spelled if how.kind != "flag" else f"{how.spelled}/--no-{how.spelled[2:]}"
        info: Any = typer.Option(name, **settings)
    else:
        info = typer.Argument(**settings)
    return inspect.Parameter(
        how.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[plain if required else plain | None, info],
        default=parameter.empty if required else None,
    )


def _help(how: Typed, parameter: inspect.Parameter) -> str:
    words = HELP.get(how.name) or _from_markers(parameter.annotation)
    notes = []
    if how.choices:
        notes.append(", ".join(how.choices))
    if how.kind == "duration":
        notes.append("such as 30d, 12h or 90s")
    if how.kind == "json":
        notes.append("JSON, or @FILE")
    if how.kind == "file":
        notes.append("- for standard input")
    if how.repeated:
        notes.append("may be repeated")
    if parameter.default not in (parameter.empty, None, "", ()):
        notes.append(f"default {_shown(parameter.default)}")
    return " ".join([*([words] if words else []), *([f"({'; '.join(notes)})"] if notes else [])])


def _from_markers(annotation: Any) -> str:
    """Words for a parameter that refers to something."""
    for marker in _markers(annotation):
        if isinstance(marker, RefersTo):
            return (
                f"{REFERENCES.get(marker.kind, f'A {marker.kind}')}: its name or id."
                if marker.kind
                else ANYTHING
            )
        if isinstance(marker, PlacedIn):
            return "A zone; falaj zone list names them."
    return ""


def _markers(annotation: Any) -> list[Any]:
    inner = [part for arg in typing.get_args(annotation) for part in _markers(arg)]
    return [*getattr(annotation, "__metadata__", ()), *inner]


def _shown(default: Any) -> str:
    if isinstance(default, timedelta):
        return duration(default)
    return str(default.value if isinstance(default, Enum) else default)


def _split(part: str, how: Typed) -> list[str]:
    """`AE,SA` is two; a comma stands in nothing else that may be repeated, but in JSON it does."""
    return [part] if how.kind == "json" else [item for item in part.split(",") if item]


def _read(text: Any, how: Typed) -> Any:
    if how.kind == "duration":
        return _length_of_time(text, how.spelled)
    return _json(text, how.spelled) if how.kind == "json" else text


def _length_of_time(text: str, where: str) -> timedelta | str:
    found = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if found:
        return timedelta(**{UNITS[found[2]]: int(found[1])})
    if text.startswith(("P", "p")):
        return text
    raise InvalidInput.at(where, given=text, allowed=DURATION_RULE, fix=f"{where} 30d")


def _json(text: str, where: str) -> Any:
    source = text
    try:
        if text == "-":
            source = sys.stdin.read()
        elif text.startswith("@"):
            source = Path(text[1:]).read_text()
        return json.loads(source)
    except OSError as error:
        raise InvalidInput.at(where, given=text, allowed=f"a readable file ({error.strerror})") from None
    except ValueError as error:
        raise InvalidInput.at(where, given=source, allowed=f"JSON ({error})") from None


def _plain(annotation: Any) -> Any:
    """`annotation` without its markers and without None."""
    if typing.get_origin(annotation) is Annotated:
        return _plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        some = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return _plain(some[0]) if len(some) == 1 else annotation
    return annotation


def _is_record(item: Any) -> bool:
    parts = typing.get_args(item) or (item,)
    return any(isinstance(part, type) and issubclass(part, BaseModel) for part in parts)


def _choices(item: Any) -> tuple[str, ...]:
    if typing.get_origin(item) is Literal:
        return tuple(str(choice) for choice in typing.get_args(item))
    if isinstance(item, type) and issubclass(item, Enum):
        return tuple(str(choice.value) for choice in item)
    return ()


def _singular(name: str) -> str:
    return name[:-2] if name.endswith("ses") else name.removesuffix("s")
