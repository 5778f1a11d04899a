"""Ask before what cannot be taken back."""

from __future__ import annotations

import sys

from falaj.errors import Conflict, InvalidInput


def confirm(question: str, *, yes: bool) -> None:
    """Go on if the answer is yes; Conflict if it is no, InvalidInput where there is nobody to ask."""
    if not yes and _answer(f"{question} [y/N]").lower() not in ("y", "yes"):
        raise Conflict("not confirmed; nothing was done")


def confirm_by_name(question: str, name: str, *, yes: bool) -> None:
    """Go on if `name` is typed; Conflict if something else is, InvalidInput where there is nobody to ask."""
    if not yes and _answer(f"{question}:") != name:
        raise Conflict(f"that is not {name!r}; nothing was done")


def _answer(question: str) -> str:
    if not sys.stdin.isatty():
        raise InvalidInput("this asks for a confirmation, and standard input is no terminal; --yes confirms")
    print(question, end=" ", file=sys.stderr, flush=True)  # stdout is for the result
    return sys.stdin.readline().strip()
