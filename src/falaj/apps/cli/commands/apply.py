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
from falaj.records.features import ChangeKind, PlannedChange
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
) -> None:
    """Apply the definitions of entities and views in files. A changed view gets a new version; the old one is kept."""
    found = read_definitions(Path(path))
    entities, views = tuple(found.entities), tuple(found.views)
    with session.platform() as platform:
        if dry_run:
            changes = platform.features.plan(entities=entities, views=views, workspace=workspace)
        else:
            changes = platform.features.apply(
                entities=entities, views=views, workspace=workspace, zone=zone
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


def _message(changes: Sequence[PlannedChange], found: Definitions, *, path: str, dry_run: bool) -> Message:
    changed = [each for each in changes if each.change is not ChangeKind.UNCHANGED]
    if not changed:
        return Message("nothing has changed", (("next", "features list"),))
    words = f"{plural(len(changed), 'definition')} {'would change' if dry_run else 'changed'}"
    if dry_run:
        return Message(words, (("next", f"apply {path}"),))
    views = [each.name for each in changed if each.kind == "view"]
    steps = [("next", f"features ingest {name} {found.sources.get(name, 'FILE')}") for name in views[:3]]
    return Message(words, tuple(steps) or (("next", "features list"),))


COMMANDS = {"apply": partial(command, "apply", apply)}
