"""How the command line presents a group of operations: each module in `commands` declares one `PRESENTATION`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

    from falaj.apps.cli.generation.typer_commands import CommandFunction
    from falaj.apps.cli.output.messages import Given, Message

    MessageFunction = Callable[[Any, Given], Message]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Presentation:
    """What a group declares beside its commands; an operation that it does not mention is presented as generated.

    `columns` are the fields that a table of a record shows, the most useful first; a record without them shows all.
    `help` and `examples` explain parameters by name. `lists` gives the command, without `falaj`, that lists the objects
    of a kind; it may be made from the name that was not found.
    `options` are the verbs of operations that an option of another command performs, and that command.
    `default` is the verb that is meant where the group is typed alone. `creating` are the verbs without an operation of
    their own that create a home, as those of operations that write do.
    """

    columns: dict[type[BaseModel], tuple[str, ...]] = field(default_factory=dict)
    help: dict[str, str] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    lists: dict[str, str | Callable[[str], str]] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    default: str | None = None
    creating: frozenset[str] = frozenset()
    commands: dict[str, CommandFunction] = field(default_factory=dict)
    messages: dict[str, MessageFunction] = field(default_factory=dict)

    def command(self, verb: str) -> Callable[[F], F]:
        """Declare a function as the command `verb`, in place of a generated one."""

        def declare(function: F) -> F:
            self.commands[verb] = function
            return function

        return declare

    def message(self, *operations: str) -> Callable[[F], F]:
        """Declare a function that makes the message after one of `operations`, from its result and its input."""

        def declare(function: F) -> F:
            self.messages |= dict.fromkeys(operations, function)
            return function

        return declare


@cache
def presentation_of(group: str) -> Presentation:
    """Return what the module of `group` declares; it is imported on first use."""
    found: Presentation = import_module(f"falaj.apps.cli.commands.{group}").PRESENTATION
    return found


def list_command(groups: Iterable[str], kind: str, name: str) -> str | None:
    """Return the command, without `falaj`, that lists what exists instead of `name`; none where no group has one."""
    found = next((lists[kind] for group in groups if kind in (lists := presentation_of(group).lists)), None)
    return found(name) if callable(found) else found
