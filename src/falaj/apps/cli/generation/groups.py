"""The commands of a group: one for each operation that is not internal, and those that its module declares."""

from __future__ import annotations

from typing import Any

from falaj.apps.cli.generation.operations import command_for
from falaj.apps.cli.generation.presentation import presentation_of
from falaj.apps.cli.generation.typer_commands import CommandFunction, group
from falaj.control.services import service_types
from falaj.governance.operations.operation import operations_of


def command_group(name: str, summary: str) -> Any:
    """Return the group `name` as a command with subcommands."""
    return group(name, summary, group_commands(name), default_command=presentation_of(name).default)


def group_commands(name: str) -> dict[str, CommandFunction]:
    """Return the commands of the group `name` by the verb that is typed, declared ones first."""
    declared = presentation_of(name).commands
    operations = operations_of(service_types()[name]).values()
    generated = {
        operation.verb.replace("_", "-"): command_for(operation)
        for operation in operations
        if not operation.internal
    }
    return declared | {verb: made for verb, made in generated.items() if verb not in declared}
