"""Ask before what cannot be taken back."""

from __future__ import annotations

import sys

import typer

from falaj.errors import Conflict, InvalidInput


def confirm(question: str, *, yes: bool) -> None:
    """Go on if the answer is yes; Conflict if it is no, InvalidInput where there is nobody to ask."""
    if not yes and not typer.confirm(_asked(question), err=True):
        raise Conflict("not confirmed; nothing was done")


def confirm_by_name(question: str, name: str, *, yes: bool) -> None:
    """Go on if `name` is typed; Conflict if something else is, InvalidInput where there is nobody to ask."""
    if not yes and typer.prompt(_asked(question), err=True) != name:
        raise Conflict(f"that is not {name!r}; nothing was done")


def _asked(question: str) -> str:
    if not sys.stdin.isatty():
        raise InvalidInput("this asks for a confirmation, and standard input is no terminal; --yes confirms")
    return question
