"""`falaj init`: create a home in a folder, with the files of the tutorial."""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.output.messages import Message, show_or_tell
from falaj.apps.cli.session import Session
from falaj.assembly.home import open_home
from falaj.errors import InvalidInput
from falaj.records.places import HOME_FOLDER

SUFFIX = ".txt"
"""The files of the tutorial are packaged with this suffix: they are text here, and no code of Falaj."""


def init(
    session: Session,
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Where; it is created if it does not exist.")
    ] = ".",
    *,
    bare: Annotated[bool, typer.Option("--bare", help="Create the home alone, without files.")] = False,
) -> None:
    """Create a home in a folder, with the files of the tutorial. Files that exist are kept as they are."""
    if session.url:
        raise InvalidInput("init creates a home on this machine; --url does not name one")
    place = Path(folder)
    home = open_home(session.home or place / HOME_FOLDER)
    written = [] if bare else write_tutorial(place)
    made = {"home": str(home.path), "files": written}
    listed = f"; written: {', '.join(written)}" if written else ""
    show_or_tell(session, made, Message(f"the home {home.path} is ready{listed}", (("next", "up --detach"),)))


def write_tutorial(folder: Path) -> list[str]:
    """Write the files of the tutorial that `folder` does not have; return their names."""
    written = []
    for packaged in sorted(
        files("falaj.apps.cli").joinpath("tutorial").iterdir(), key=lambda each: each.name
    ):
        path = folder / packaged.name.removesuffix(SUFFIX)
        if packaged.name.endswith(SUFFIX) and not path.exists():
            path.write_text(packaged.read_text())
            written.append(path.name)
    return written


COMMANDS = {"init": partial(command, "init", init)}
