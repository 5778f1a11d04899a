"""Reads a space of hyperparameters in TOML, or from a dict: one parameter an entry, faults with their lines."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from falaj.errors import Fault, InvalidInput, shorten
from falaj.governance.operations.operation import allowed_values
from falaj.records.names import repeated_names
from falaj.records.tuning import ChoiceParam, FloatParam, IntParam, ParamName, ParamRange, ParamSpace
from falaj.sdk.definition_files.toml_lines import TomlLines

EXAMPLE = "lr = {low = 1e-5, high = 1e-1, log = true}"
KINDS: dict[str, type[FloatParam | IntParam | ChoiceParam]] = {
    "float": FloatParam,
    "int": IntParam,
    "choice": ChoiceParam,
}
FIELDS = ("low", "high", "log", "step", "type", "choices")
CONDITIONS = frozenset({"when", "if", "only_if", "condition", "conditions", "depends_on", "parent"})
"""Fields by which other tools make a parameter depend on another."""
ALLOWED = f"a range like {{low = 1, high = 4}}, with {', '.join(FIELDS[2:5])} if needed, or a list of choices"

_name = TypeAdapter(ParamName)
Where = Callable[[str], str]


def read_space(path: str | Path) -> ParamSpace:
    """Return the space in a file; raise InvalidInput with all faults and their lines."""
    path = Path(path)
    try:
        text = path.read_text()
        given = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        where = f"{path}:{line[1]}" if line else str(path)
        fault = Fault(where=where, given=shorten(str(error)), allowed="a TOML file in UTF-8", fix=EXAMPLE)
        raise InvalidInput(f"the space in {path} cannot be read", faults=[fault]) from None
    lines = TomlLines(text)
    return parse_space(given, where=lambda dotted: f"{path}:{lines.line(tuple(dotted.split('.')))} {dotted}")


def parse_space(given: Mapping[str, Any], *, where: Where = lambda dotted: f"space.{dotted}") -> ParamSpace:
    """Return the space in `given`; raise InvalidInput with all faults. `where` returns the place of a field."""
    faults: list[Fault] = []
    space: ParamSpace = {}
    if not given:
        faults.append(
            Fault(where=where("").strip(". "), given="no parameter", allowed="one at least", fix=EXAMPLE)
        )
    for name, value in given.items():
        faults += _name_faults(name, where)
        found = parse_range(str(name), value, where=where, faults=faults)
        if found is not None:
            space[str(name)] = found
    for name in repeated_names(space):
        faults.append(Fault(where=where(name), given=name, allowed="names that differ in more than case"))
    if faults:
        raise InvalidInput(f"{len(faults)} fault{'s' * (len(faults) != 1)} in the space", faults=faults)
    return space


def parse_range(name: str, given: Any, *, where: Where, faults: list[Fault]) -> ParamRange | None:
    """Return the range of a parameter; append what is wrong to `faults`."""
    if isinstance(given, FloatParam | IntParam | ChoiceParam):
        return given
    if isinstance(given, list | tuple):
        given = {"choices": given}
    if not isinstance(given, Mapping):
        faults.append(
            Fault(where=where(name), given=shorten(given), allowed=ALLOWED, fix=f"{name} = [{given!r}]")
        )
        return None
    unknown = [field for field in given if field not in FIELDS]
    faults += [_unknown_field(name, str(field), where) for field in unknown]
    kind = given.get("type", _kind(given))
    if kind not in KINDS:
        faults.append(Fault(where=where(f"{name}.type"), given=shorten(kind), allowed=", ".join(KINDS)))
        return None
    try:
        values = {field: value for field, value in given.items() if field not in unknown}
        if isinstance(values.get("choices"), list):
            values["choices"] = tuple(values["choices"])
        return KINDS[kind].model_validate({**values, "type": kind}, strict=True)  # "1" is a text, not a bound
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_context=False):
            at = str(fault["loc"][0]) if fault["loc"] else ""
            faults.append(
                Fault(
                    where=where(f"{name}.{at}" if at else name),
                    given=None if fault["type"] == "missing" or not at else shorten(fault["input"]),
                    allowed=allowed_values(fault["msg"]),
                    fix=EXAMPLE if fault["type"] == "missing" else None,
                )
            )
        return None


def _kind(given: Mapping[str, Any]) -> str:
    """Return the type that is meant: whole bounds are those of whole numbers."""
    if "choices" in given:
        return "choice"
    numbers = [given[field] for field in ("low", "high", "step") if given.get(field) is not None]
    return "int" if numbers and all(isinstance(each, int) for each in numbers) else "float"


def _name_faults(name: object, where: Where) -> list[Fault]:
    try:
        _name.validate_python(name)
    except ValidationError as error:
        words = allowed_values(error.errors()[0]["msg"])
        return [Fault(where=where(str(name)), given=shorten(name), allowed=words)]
    return []


def _unknown_field(name: str, field: str, where: Where) -> Fault:
    if field in CONDITIONS:
        allowed = "parameters that every trial has: a space has no conditions"
        fix = "remove it, and let the script ignore the parameter where it means nothing; or make a study for each case"
        return Fault(where=where(f"{name}.{field}"), given=field, allowed=allowed, fix=fix)
    close = difflib.get_close_matches(field, FIELDS, n=1)
    fix = f"did you mean {close[0]}?" if close else "remove it"
    return Fault(where=where(f"{name}.{field}"), given=field, allowed=", ".join(FIELDS), fix=fix)
