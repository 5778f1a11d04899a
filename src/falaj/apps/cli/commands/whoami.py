"""`falaj whoami`: who you are on the platform."""

from __future__ import annotations

from typing import Any

from falaj.apps.cli.generation.operations import command_for
from falaj.apps.cli.generation.typer_commands import command
from falaj.control.services import all_operations


def whoami_command() -> Any:
    """Return the command of the operation users.whoami under a name of its own."""
    return command("whoami", command_for(all_operations()["users.whoami"]))


COMMANDS = {"whoami": whoami_command}
