"""`falaj workspaces`: workspaces, and who holds which role in them."""

from __future__ import annotations

from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message, command_with
from falaj.records.governance.identity import Grant, Workspace

PRESENTATION = Presentation(
    columns={Workspace: ("name", "created_at", "id")},
    help={"role": "Which role."},
    lists={"workspace": "workspaces list"},
)


@PRESENTATION.message("workspaces.create")
def _created(made: Workspace, given: Given) -> Message:
    grant = f"workspaces grant {made.name} USER --role developer"
    return Message(f"workspace {made.name} is created; you administer it", (("next", grant),))


@PRESENTATION.message("workspaces.grant")
def _granted(made: Grant, given: Given) -> Message:
    undo = command_with(f"workspaces revoke {made.workspace}", given["subject"], f"--role {made.role}")
    return Message(f"{made.subject} is {made.role} in {made.workspace}", (("undo", undo),))


@PRESENTATION.message("workspaces.revoke")
def _revoked(made: Grant, given: Given) -> Message:
    undo = command_with(f"workspaces grant {made.workspace}", given["subject"], f"--role {made.role}")
    return Message(f"{made.subject} is no longer {made.role} in {made.workspace}", (("undo", undo),))
