"""`falaj version`: print the version."""

from __future__ import annotations

from functools import partial

from falaj import __version__
from falaj.apps.cli.app import PROGRAM
from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.session import Session


def version(session: Session) -> None:
    """Print the version of this installation; falaj platform status prints that of a platform."""
    session.show({"version": __version__}, lambda found: print(f"{PROGRAM} {found['version']}"))


COMMANDS = {"version": partial(command, "version", version)}
