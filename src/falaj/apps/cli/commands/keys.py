"""`falaj keys destroy`: it asks for the workspace's name, because there is no way back."""

from __future__ import annotations

from typing import Annotated

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.generation.operations import YES, present
from falaj.apps.cli.output.prompts import confirm_by_name
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations


def destroy(
    session: Session,
    workspace: Annotated[str, typer.Argument(metavar="WORKSPACE", help="A workspace: its name or id.")],
    *,
    yes: YES = False,
) -> None:
    """Destroy a workspace's data keys: nobody can read its blobs again. There is no undo."""
    operation, given = all_operations()["keys.destroy"], {"workspace": workspace}
    parsing.check(operation, given)
    with session.platform() as platform:
        name = platform.workspaces.show(workspace).name
        question = f"Nobody will ever read the blobs of {name} again. Type the workspace's name to go on"
        confirm_by_name(question, name, yes=yes)
        present(session, operation, given, platform.keys.destroy(workspace))


GROUP_COMMANDS = {"destroy": destroy}
