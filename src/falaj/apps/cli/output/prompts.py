"""Asks for confirmation before an operation that cannot be undone."""

from __future__ import annotations

import sys

from falaj.errors import Conflict, InvalidInput


def confirm(question: str, *, yes: bool) -> None:
    """Return if the answer is yes; raise Conflict if it is no, InvalidInput where stdin is not a terminal."""
    if not yes and _answer(f"{question} [y/N]").lower() not in ("y", "yes"):
        raise Conflict("not confirmed; nothing was done")


def confirm_by_name(question: str, name: str, *, yes: bool) -> None:
    """Return if `name` is typed; raise Conflict otherwise, InvalidInput where stdin is not a terminal."""
    if not yes and _answer(f"{question}:") != name:
        raise Conflict(f"that is not {name!r}; nothing was done")


def require_answerable(*, yes: bool) -> None:
    """Raise InvalidInput if a question could not be answered, before anything is opened for it."""
    if not yes and not sys.stdin.isatty():
        raise InvalidInput("this needs a confirmation, and standard input is not a terminal; --yes confirms")


def _answer(question: str) -> str:
    require_answerable(yes=False)
    print(question, end=" ", file=sys.stderr, flush=True)  # stdout is for the result
    return sys.stdin.readline().strip()
