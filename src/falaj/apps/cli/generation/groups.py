"""The commands of a room: one for each of its operations, and those that are written by hand for people."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from falaj.apps.cli.generation.operations import command_for
from falaj.apps.cli.generation.typer_commands import CommandFunction, group
from falaj.control.services import service_types
from falaj.governance.operations.operation import operations_of

CUSTOM_COMMANDS = {
    "audit": "audit",
    "blobs": "blobs",
    "endpoints": "endpoints",
    "features": "features",
    "jobs": "jobs",
    "keys": "keys",
    "lineage": "lineage",
    "models": "models",
    "monitoring": "monitoring",
    "nodes": "nodes",
    "optimization": "optimization",
    "pipelines": "pipelines",
    "policies": "policies",
    "queues": "queues",
    "runs": "runs",
    "secrets": "secrets",
    "tokens": "tokens",
    "usage": "usage",
    "workflows": "work",
}
"""The module here whose `ROOM` has the hand-written commands of a room; they replace generated ones."""


DEFAULT_COMMANDS = {"usage": "show"}
"""The command of a room that is meant where its name stands alone."""


def command_group(room: str, words: str) -> Any:
    """The group of the commands of `room`."""
    return group(room, words, group_commands(room), default_command=DEFAULT_COMMANDS.get(room))


def group_commands(room: str) -> dict[str, CommandFunction]:
    """The commands of `room` by the verb that is typed, those for people first."""
    operations = operations_of(service_types()[room]).values()
    generated = {operation.verb.replace("_", "-"): command_for(operation) for operation in operations}
    return custom_commands(room) | {
        verb: make for verb, make in generated.items() if verb not in custom_commands(room)
    }


def custom_commands(room: str) -> dict[str, CommandFunction]:
    """The hand-written commands of `room`."""
    if room not in CUSTOM_COMMANDS:
        return {}
    commands: dict[str, CommandFunction] = import_module(
        f"falaj.apps.cli.commands.{CUSTOM_COMMANDS[room]}"
    ).GROUP_COMMANDS
    return commands
