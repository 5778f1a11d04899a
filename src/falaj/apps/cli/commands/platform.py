"""`falaj up`, `falaj status`, `falaj down` and `falaj platform`: the platform as processes on this machine."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.output.errors import FAILED
from falaj.apps.cli.output.messages import Message, print_message, show_or_tell
from falaj.apps.cli.output.results import show
from falaj.apps.cli.session import Session
from falaj.apps.supervisor import down, status, up, up_detached
from falaj.errors import InvalidInput

PRESENTATION = Presentation()


def start(
    session: Session,
    *,
    port: Annotated[
        str | None, typer.Option(metavar="PORT", help="Listen here instead of server.port.")
    ] = None,
    bind: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Listen here instead of server.bind.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Start it in the background; falaj down stops it.")
    ] = False,
) -> int:
    """Start the platform on this machine, in the foreground; Ctrl-C stops it."""
    _require_home(session)
    number = _port(port)
    if not detach:
        return up(session.home, port=number, bind=bind)
    typed = [("--port", port), ("--bind", bind)]
    found = up_detached(session.home, options=[word for pair in typed if pair[1] for word in pair if word])
    words = f"Falaj runs at {found.url} (home {found.home}), as process {found.pid}"
    follow = (("next", "tokens sign-in-link"), ("undo", "down"))
    show_or_tell(session, found, Message(words, follow))
    return 0


def show_status(session: Session) -> int:
    """Show whether a platform runs on the home, and where; exit 1 if none does, or a process keeps failing."""
    _require_home(session)
    found = status(session.home)
    if session.json or found.running:
        show(found, as_json=session.json)
    else:
        print_message(session, Message(f"no platform runs on {found.home}", (("next", "up"),)))
    return 0 if found.running and not found.failing else FAILED


def stop(session: Session) -> None:
    """Stop the platform that runs on the home."""
    _require_home(session)
    print("the platform is stopped" if down(session.home) else "no platform runs on this home")


def _require_home(session: Session) -> None:
    if session.url:
        raise InvalidInput("this command acts on a home on this machine; --url does not name one")


def _port(text: str | None) -> int | None:
    if text is None or (text.isascii() and text.isdigit() and int(text) < 65536):
        return None if text is None else int(text)
    raise InvalidInput.at("--port", given=text, allowed="0 to 65535; 0 selects a free port")


COMMANDS = {
    "up": partial(command, "up", start, prints=False),
    "status": partial(command, "status", show_status),
    "down": partial(command, "down", stop, prints=False),
}
