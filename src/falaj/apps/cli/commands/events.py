"""`falaj events`: list what was done on the platform, and watch it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import format_value, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.governance.events import Event
from falaj.records.record import utc_now

POLL_S = 1.0

TYPES = "A type of event, such as models.promote or jobs.*."

PRESENTATION = Presentation(
    columns={Event: ("at", "type", "name", "caller", "subject", "id")},
    help={"types": TYPES, "since": "Only events since then."},
    examples={"types": "jobs.*"},
)


@PRESENTATION.command("watch")
def watch(
    session: Session,
    *,
    types: Annotated[list[str] | None, typer.Option("--type", metavar="TYPE", help=TYPES)] = None,
    workspace: arguments.IN_WORKSPACE = None,
) -> None:
    """Print events as they happen, until Ctrl-C; with --json one line each."""
    operation = all_operations()["events.list"]
    given = parsing.parse(operation, {"types": types, "workspace": workspace})
    parsing.check(operation, given)
    given["since"] = utc_now()
    with session.platform() as platform:
        after, seen = "", set[str]()
        while True:
            page = platform.events.list(**given, after=after, limit=1000)
            for event in page.items:
                if event.id not in seen:
                    print_event(session, event)
            if page.next is not None:
                after, seen = page.next, set()
                continue
            seen |= {each.id for each in page.items}
            time.sleep(POLL_S)


def print_event(session: Session, event: Event) -> None:
    """Print an event on one line, with the words of an alert or a verdict."""
    if session.json:
        show(event, as_json=True)
    else:
        shown = [format_value(event.at), event.type, event.name or event.subject, event.caller or ""]
        words = event.data.get("words")
        print("  ".join([*shown, *([printable(str(words))] if words else [])]), flush=True)
