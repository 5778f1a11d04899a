"""The commands of a room: one for each of its operations, and those that are written by hand for people."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from falaj.apps.cli.commands import CommandFunction, group
from falaj.apps.cli.generated import command_for
from falaj.control.services import service_types
from falaj.governance.operations.operation import operations_of

BY_HAND = {
    "audit": "audit",
    "blobs": "blobs",
    "endpoints": "serving",
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


ALONE = {"usage": "show"}
"""The command of a room that is meant where its name stands alone."""


def room_group(room: str, words: str) -> Any:
    """The group of the commands of `room`."""
    return group(room, words, room_commands(room), alone=ALONE.get(room))


def room_commands(room: str) -> dict[str, CommandFunction]:
    """The commands of `room` by the verb that is typed, those for people first."""
    operations = operations_of(service_types()[room]).values()
    generated = {operation.verb.replace("_", "-"): command_for(operation) for operation in operations}
    return by_hand(room) | {verb: make for verb, make in generated.items() if verb not in by_hand(room)}


def by_hand(room: str) -> dict[str, CommandFunction]:
    """The hand-written commands of `room`."""
    if room not in BY_HAND:
        return {}
    commands: dict[str, CommandFunction] = import_module(f"falaj.apps.cli.{BY_HAND[room]}").ROOM
    return commands
