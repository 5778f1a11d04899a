"""The commands of a group: one for each operation that is not internal, and those that its module declares.

An operation may be an option of another command instead.
"""

from __future__ import annotations

from typing import Any

from falaj.apps.cli.generation.operations import command_for
from falaj.apps.cli.generation.presentation import presentation_of
from falaj.apps.cli.generation.typer_commands import CommandFunction, group
from falaj.control.services import service_types
from falaj.governance.operations.operation import operations_of


def command_group(name: str, summary: str) -> Any:
    """Return the group `name` as a command with subcommands."""
    presentation = presentation_of(name)
    return group(
        name,
        summary,
        group_commands(name),
        default_command=presentation.default,
        creating={*presentation.creating, *_writing(name)},
    )


def _writing(name: str) -> list[str]:
    """Return the verbs of the group's operations that write."""
    operations = operations_of(service_types()[name]).values()
    return [operation.verb.replace("_", "-") for operation in operations if not operation.mode.reads]


def group_commands(name: str) -> dict[str, CommandFunction]:
    """Return the commands of the group `name` by the verb that is typed, declared ones first."""
    presentation = presentation_of(name)
    operations = operations_of(service_types()[name]).values()
    generated = {
        operation.verb.replace("_", "-"): command_for(operation)
        for operation in operations
        if not operation.internal
    }
    taken = {*presentation.commands, *presentation.options}
    return presentation.commands | {verb: made for verb, made in generated.items() if verb not in taken}
