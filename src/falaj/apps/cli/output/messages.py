"""Messages after a write: what happened, then the next command, or the command that undoes it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from falaj.apps.cli.output.results import show
from falaj.apps.cli.session import Session

Given = Mapping[str, Any]
"""The input of an operation, by parameter."""


class Message(NamedTuple):
    """What happened, and commands to run next as (label, command without `falaj`)."""

    text: str
    then: tuple[tuple[str, str], ...] = ()


def print_message(session: Session, message: Message) -> None:
    """Print the text, then each command as it must be typed to reach the same platform."""
    print(message.text)
    for label, command in message.then:
        print(f"  {label:<6} {session.full_command(command)}")


def show_or_tell(session: Session, result: Any, message: Message) -> None:
    """Print `result` as JSON where --json was given, else `message`."""
    if session.json:
        show(result, as_json=True)
    else:
        print_message(session, message)


def command_with(start: str, value: Any, *rest: str) -> str:
    """Return a command line of `start`, a value that a user typed (quoted), and `rest`."""
    return " ".join([start, shlex.quote(str(value)), *rest])


def workspace_prefix(given: Given) -> str:
    """Return `WORKSPACE/` where a workspace was given, to put in front of a name."""
    return f"{given['workspace']}/" if given.get("workspace") else ""
