"""The parameters of an operation on the command line: how each is typed, and its help."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple

import typer
from pydantic import BaseModel

from falaj.apps.cli.generation.presentation import presentation_of
from falaj.apps.cli.names import BY_ID, completion_of
from falaj.apps.cli.output.values import format_duration
from falaj.governance.operations.operation import Operation
from falaj.records.names import PlacedIn, RefersTo

HELP = {
    "after": "Continue after this cursor.",
    "classes": "Classes of the data, such as personal.",
    "limit": "At most so many.",
    "name": "1 to 128 of a-z, 0-9, '-', '_' and '.'",
    "only": "Allow these jurisdictions only, such as AE.",
}
"""Help of parameters that several groups have; each group declares its own, and references explain themselves."""

EXAMPLES = {"classes": "personal", "limit": "100", "only": "AE"}
"""A valid value of such a parameter, for the fix of a fault."""

AFTER = Annotated[str, typer.Option(metavar="AFTER", help=HELP["after"])]
ALL = Annotated[bool, typer.Option("--all", help="List everything, not one page.")]
LIMIT = Annotated[str, typer.Option(metavar="LIMIT", help=HELP["limit"])]
NAME = Annotated[str, typer.Argument(metavar="NAME", help=HELP["name"])]
ONLY = Annotated[list[str] | None, typer.Option(metavar="ONLY", help=HELP["only"])]
CLASSES = Annotated[list[str] | None, typer.Option("--class", metavar="CLASS", help=HELP["classes"])]
OF_WORKSPACE = Annotated[
    str | None,
    typer.Option(
        "--workspace",
        metavar="WORKSPACE",
        help="Of this workspace.",
        autocompletion=completion_of("workspace"),
    ),
]
IN_WORKSPACE = Annotated[
    str | None,
    typer.Option(
        "--workspace",
        metavar="WORKSPACE",
        help="The workspace that it belongs to.",
        autocompletion=completion_of("workspace"),
    ),
]
IN_ZONE = Annotated[
    str | None,
    typer.Option(
        "--zone",
        metavar="ZONE",
        help="The zone that stores its bytes.",
        autocompletion=completion_of("zone"),
    ),
]
ENDPOINT = Annotated[
    str,
    typer.Argument(
        metavar="ENDPOINT", help="An endpoint: its name or id.", autocompletion=completion_of("endpoint")
    ),
]
SHORT = "its id or the beginning of it, its name, or last for the newest."
JOB = Annotated[
    str, typer.Argument(metavar="JOB", help=f"A job: {SHORT}", autocompletion=completion_of("job"))
]
YES = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]

REFERENCES = {"user": "A user or service account", "subject": "A user, service account or group"}

ArgumentKind = Literal["text", "flag", "duration", "json", "file"]


class ArgumentSpec(NamedTuple):
    """How one parameter is typed; `word` stands for its value in the help."""

    name: str
    spelled: str
    word: str
    kind: ArgumentKind
    repeated: bool
    choices: tuple[str, ...]

    @property
    def is_option(self) -> bool:
        return self.spelled.startswith("-")


def argument_specs(operation: Operation) -> dict[str, ArgumentSpec]:
    """Return how each parameter of `operation` is typed: positional ones as arguments, the others as options."""
    return {name: _typed(operation, name) for name in operation.parameters}


def signature(operation: Operation) -> list[inspect.Parameter]:
    """Return the parameters for typer: text, lists of text and flags only."""
    return [_for_typer(typed, operation) for typed in argument_specs(operation).values()]


def command_path(operation: Operation) -> str:
    """Return what is typed after `falaj`."""
    return f"{operation.group} {operation.verb.replace('_', '-')}"


def _typed(operation: Operation, name: str) -> ArgumentSpec:
    parameter = operation.parameters[name]
    plain = _plain(parameter.annotation)
    repeated = typing.get_origin(plain) is tuple
    item = _plain(typing.get_args(plain)[0]) if repeated else plain
    kind: ArgumentKind = "file" if name == operation.upload else _kind(item)
    one = _singular(name) if repeated else name
    word = {"file": "FILE", "duration": "TIME"}.get(kind, one.upper())
    spelled = f"--{one.replace('_', '-')}" if parameter.kind is parameter.KEYWORD_ONLY else word
    return ArgumentSpec(name, spelled, word, kind, repeated, _choices(item))


def _kind(item: Any) -> ArgumentKind:
    if item is bool:
        return "flag"
    if item is timedelta:
        return "duration"
    parts = typing.get_args(item) or (item,)
    is_record = any(isinstance(part, type) and issubclass(part, BaseModel) for part in parts)
    return "json" if is_record or dict in (item, typing.get_origin(item)) else "text"


def _for_typer(how: ArgumentSpec, operation: Operation) -> inspect.Parameter:
    parameter = operation.parameters[how.name]
    required = parameter.default is parameter.empty
    own_help = presentation_of(operation.group).help
    settings: dict[str, Any] = {"metavar": how.word, "help": _help(how, parameter, own_help)}
    if how.choices:
        settings["autocompletion"] = lambda: list(how.choices)
    elif (kind := _referred_kind(parameter.annotation)) is not None:
        settings["autocompletion"] = completion_of(kind)
    plain: Any = bool if how.kind == "flag" else list[str] if how.repeated else str
    flag = f"{how.spelled}/--no-{how.spelled[2:]}" if how.kind == "flag" else how.spelled
    info: Any = typer.Option(flag, **settings) if how.is_option else typer.Argument(**settings)
    return inspect.Parameter(
        how.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[plain if required else plain | None, info],
        default=parameter.empty if required else None,
    )


def _help(how: ArgumentSpec, parameter: inspect.Parameter, own_help: Mapping[str, str]) -> str:
    words = own_help.get(how.name) or HELP.get(how.name) or _from_markers(parameter.annotation)
    notes = [", ".join(how.choices)] if how.choices else []
    notes += {
        "duration": ["such as 30d, 12h or 90s"],
        "json": ["JSON, or @FILE"],
        "file": ["- for standard input"],
    }.get(how.kind, [])
    notes += ["may be repeated"] if how.repeated else []
    if parameter.default not in (parameter.empty, None, "", ()):
        notes.append(f"default {_shown(parameter.default)}")
    return " ".join([*([words] if words else []), *([f"({'; '.join(notes)})"] if notes else [])])


def _from_markers(annotation: Any) -> str:
    """Return the help of a parameter that refers to an object or a zone."""
    for marker in _markers(annotation):
        if isinstance(marker, RefersTo) and marker.kind is None:
            return "An id, or kind:name."
        if isinstance(marker, RefersTo):
            words = REFERENCES.get(marker.kind or "") or _with_article(marker.kind or "")
            return f"{words}: {SHORT if marker.kind in BY_ID else 'its name or id.'}"
        if isinstance(marker, PlacedIn):
            return "A zone; list them with falaj zones list."
    return ""


def _referred_kind(annotation: Any) -> str | None:
    """Return the kind of what a parameter refers to; none where it is anything, or no reference."""
    for marker in _markers(annotation):
        if isinstance(marker, RefersTo | PlacedIn):
            return marker.kind if isinstance(marker, RefersTo) else "zone"
    return None


def _with_article(kind: str) -> str:
    return f"{'An' if kind[:1] in 'aeiou' else 'A'} {kind.replace('_', ' ')}"


def _markers(annotation: Any) -> list[Any]:
    inner = [part for arg in typing.get_args(annotation) for part in _markers(arg)]
    return [*getattr(annotation, "__metadata__", ()), *inner]


def _shown(default: Any) -> str:
    if isinstance(default, timedelta):
        return format_duration(default)
    if isinstance(default, tuple):
        return ", ".join(_shown(each) for each in default)
    return str(default.value if isinstance(default, Enum) else default)


def _plain(annotation: Any) -> Any:
    """Return `annotation` without its markers and without None."""
    if typing.get_origin(annotation) is Annotated:
        return _plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        some = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return _plain(some[0]) if len(some) == 1 else annotation
    return annotation


def _choices(item: Any) -> tuple[str, ...]:
    if typing.get_origin(item) is Literal:
        return tuple(str(choice) for choice in typing.get_args(item))
    if isinstance(item, type) and issubclass(item, Enum):
        return tuple(str(choice.value) for choice in item)
    return ()


def _singular(name: str) -> str:
    if name.endswith("ies"):
        return name.removesuffix("ies") + "y"
    return name[:-2] if name.endswith("ses") else name.removesuffix("s")
