"""`falaj apply`: apply the definitions of entities and views in files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.output.messages import Message, print_message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import format_value, plural
from falaj.apps.cli.session import Session
from falaj.records.features import ChangeKind, KeepRows, PlannedChange
from falaj.sdk.definition_files.features import Definitions, read_definitions


def apply(
    session: Session,
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A TOML or Python file, or a folder with features.toml."),
    ] = ".",
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")
    ] = False,
    workspace: Annotated[
        str | None, typer.Option(metavar="WORKSPACE", help="The workspace that they belong to.")
    ] = None,
    zone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="The zone that stores the rows of new views.")
    ] = None,
    keep_rows: Annotated[
        KeepRows,
        typer.Option(
            help="The rows that a new version takes over: those that fit, also those of another sql, or none."
        ),
    ] = KeepRows.COMPATIBLE,
) -> None:
    """Apply the definitions of entities and views in files. A changed view gets a new version; the old one is kept."""
    found = read_definitions(Path(path))
    entities, views = tuple(found.entities), tuple(found.views)
    with session.platform() as platform:
        if dry_run:
            changes = platform.features.plan(
                entities=entities, views=views, workspace=workspace, keep_rows=keep_rows
            )
        else:
            changes = platform.features.apply(
                entities=entities, views=views, workspace=workspace, zone=zone, keep_rows=keep_rows
            ).changes
    if session.json:
        show(changes, as_json=True)
        return
    _show_changes(changes)
    print_message(session, _message(changes, found, path=path, dry_run=dry_run))


def _show_changes(changes: Sequence[PlannedChange]) -> None:
    rows = [
        [each.kind, each.name, format_value(each.version), each.change.value, ", ".join(each.differences)]
        for each in changes
    ]
    show_rows(["kind", "name", "version", "change", "differs in"], rows)
    for each in changes:
        for note in each.notes:
            print(f"  note   {each.name}: {note}")


def _message(changes: Sequence[PlannedChange], found: Definitions, *, path: str, dry_run: bool) -> Message:
    changed = [each for each in changes if each.change is not ChangeKind.UNCHANGED]
    if not changed:
        return Message("nothing has changed", (("next", "features list"),))
    words = f"{plural(len(changed), 'definition')} {'would change' if dry_run else 'changed'}"
    if dry_run:
        return Message(words, (("next", f"apply {path}"),))
    views = [each for each in changed if each.kind == "view"]
    steps = [("next", _next_step(each, found)) for each in views[:3]]
    return Message(words, tuple(steps) or (("next", "features list"),))


def _next_step(change: PlannedChange, found: Definitions) -> str:
    if change.kept_rows:
        return f"features materialize {change.name}"
    return f"features ingest {change.name} {found.sources.get(change.name, 'FILE')}"


COMMANDS = {"apply": partial(command, "apply", apply, creates_home=True)}
