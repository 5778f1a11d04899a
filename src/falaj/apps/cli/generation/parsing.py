"""Parses what was typed into the input of an operation.

Values stay text as far as possible: the operation's own validation reports what is wrong with them.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from falaj.apps.cli.generation.arguments import EXAMPLES, ArgumentSpec, argument_specs, command_path
from falaj.apps.cli.generation.presentation import presentation_of
from falaj.apps.cli.output.values import format_duration
from falaj.errors import Fault, InvalidInput
from falaj.governance.operations.operation import Operation, invalid
from falaj.records import durations
from falaj.records.durations import read_duration
from falaj.records.names import Name


def parse(operation: Operation, typed: Mapping[str, Any], *, command: str | None = None) -> dict[str, Any]:
    """Return what was typed as the operation's input, without the parameters that were not typed."""
    given: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, how in argument_specs(operation).items():
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
        raise InvalidInput(not_valid(command or command_path(operation), faults), faults=faults)
    return given


def check(
    operation: Operation,
    given: Mapping[str, Any],
    *,
    command: str | None = None,
    spelling: Mapping[str, str] | None = None,
) -> None:
    """Validate the input of `operation`; its faults name arguments and options as they are typed.

    A `command` that a module declares may have a `spelling` of its own.
    """
    try:
        operation.check(given)
    except InvalidInput as error:
        spelled = {name: how.spelled for name, how in argument_specs(operation).items()}
        examples = EXAMPLES | presentation_of(operation.group).examples
        faults = [_as_typed(fault, given, spelled | dict(spelling or {}), examples) for fault in error.faults]
        raise type(error)(not_valid(command or command_path(operation), faults), faults=faults) from None


def check_record(
    kind: type[BaseModel],
    given: Mapping[str, Any],
    *,
    command: str,
    spelling: Mapping[str, str] | None = None,
) -> None:
    """Validate fields of a record that were typed as options; its faults name the options."""
    try:
        kind.model_validate(given)
    except ValidationError as error:
        raise name_options(invalid(command, error), command=command, spelling=spelling) from None


def name_options(
    error: InvalidInput, *, command: str, spelling: Mapping[str, str] | None = None
) -> InvalidInput:
    """Return `error` with the fields that are wrong named as the options that set them."""
    faults = []
    for fault in error.faults:
        name = fault.where.removeprefix("spec.").partition(".")[0]
        spelled = (spelling or {}).get(name, f"--{name.replace('_', '-')}")
        faults.append(fault.model_copy(update={"where": spelled}))
    return type(error)(not_valid(command, faults), faults=faults)


def check_name(where: str, name: str, *, command: str) -> None:
    """Raise InvalidInput unless `name` follows the rule for names."""
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        fault = invalid(command, error).faults[0].model_copy(update={"where": where})
        raise InvalidInput(not_valid(command, [fault]), faults=[fault]) from None


def unparse(operation: Operation, given: Mapping[str, Any], **changed: str) -> str:
    """Return the command line, without `falaj`, that gives `given` again, except for what is `changed`."""
    words = [command_path(operation)]
    for name, how in argument_specs(operation).items():
        value = changed.get(name, given.get(name))
        for item in value if how.repeated and value else [value]:
            if item is not None:
                shown = format_duration(item) if isinstance(item, timedelta) else str(item)
                words += [*([how.spelled] if how.is_option else []), shlex.quote(shown)]
    return " ".join(words)


def _as_typed(
    fault: Fault, given: Mapping[str, Any], spelled: Mapping[str, str], examples: Mapping[str, str]
) -> Fault:
    name = fault.where.partition(".")[0]
    value, where = given.get(name), spelled.get(name, fault.where)
    changes: dict[str, str] = {"where": where}
    if isinstance(value, timedelta):
        changes["given"] = format_duration(value)
    if fault.fix is None and name in examples:
        changes["fix"] = f"{where} {examples[name]}"
    return fault.model_copy(update=changes)


def not_valid(command: str, faults: Sequence[Fault]) -> str:
    """Return the message of an error with `faults` in what was typed for `command`."""
    what = f"{faults[0].where} is" if len(faults) == 1 else f"{len(faults)} values are"
    return f"falaj {command}: {what} not valid"


def _split(part: str, how: ArgumentSpec) -> list[str]:
    """Return the values in `part`: `AE,SA` is two. Only JSON may contain a comma of its own."""
    return [part] if how.kind == "json" else [item for item in part.split(",") if item]


def _read(text: Any, how: ArgumentSpec) -> Any:
    if how.kind == "duration":
        return parse_duration(text, how.spelled)
    return _json(text, how.spelled) if how.kind == "json" else text


def parse_request_features(typed: Sequence[str]) -> list[dict[str, str]]:
    """Return what was typed as NAME=EXPRESSION as the fields of request-time features."""
    found = []
    for text in typed:
        name, equals, expression = text.partition("=")
        if not (equals and name.strip() and expression.strip()):
            raise InvalidInput.at(
                "--request-feature",
                given=text,
                allowed="NAME=EXPRESSION",
                fix="--request-feature 'ratio = amount / stats__mean_amount'",
            )
        found.append({"name": name.strip(), "expression": expression.strip()})
    return found


def parse_duration(text: str, where: str) -> timedelta | str:
    """Return the duration that `text` gives; ISO 8601 is left to the operation's validation."""
    if (found := read_duration(text)) is not None:
        return found
    if text.upper().startswith("P"):  # ISO 8601
        return text
    raise InvalidInput.at(where, given=text, allowed=durations.RULE, fix=f"{where} 30d")


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
