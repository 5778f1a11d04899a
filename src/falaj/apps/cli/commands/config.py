"""`falaj config check` and `falaj config show`: falaj.toml, and the defaults of what it leaves out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from falaj.apps.cli.generation.typer_commands import group
from falaj.apps.cli.output.results import show as show_result
from falaj.apps.cli.session import Session
from falaj.assembly.config import read_config
from falaj.errors import InvalidInput
from falaj.records.places import default_home

FILE = Annotated[str | None, typer.Argument(metavar="FILE", help="A file instead of falaj.toml in the home.")]


def check(session: Session, file: FILE = None) -> None:
    """Say whether falaj.toml is valid; every fault with its line."""
    path = _path(session, file)
    config = read_config(path)
    if session.json:
        show_result({"file": str(path), "valid": True}, as_json=True)
    elif path.exists():
        print(f"{path} is valid: {len(config.zones)} zone(s), metadata on {config.metadata.driver}")
    else:
        print(f"there is no {path}; the defaults hold (falaj config show)")


def show(session: Session, file: FILE = None) -> None:
    """Print falaj.toml with the defaults of all that it leaves out; the result is a valid falaj.toml."""
    config = read_config(_path(session, file))
    if session.json:
        show_result(config, as_json=True)
    else:
        print("\n".join(toml_lines(config)))


def _path(session: Session, file: str | None) -> Path:
    """The file that is meant. Nothing is made where there is no home."""
    if file is None:
        return (session.home or default_home()).absolute() / "falaj.toml"
    if not Path(file).is_file():
        raise InvalidInput.at("FILE", given=file, allowed="a TOML file that is there")
    return Path(file)


COMMANDS = {
    "config": partial(
        group, "config", "Check falaj.toml, or show it with its defaults.", {"check": check, "show": show}
    )
}
