"""`falaj keys`: list and rotate data keys, and destroy those of a workspace after its name was typed."""

from __future__ import annotations

from typing import Annotated

import typer

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import present
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message
from falaj.apps.cli.output.prompts import confirm_by_name
from falaj.apps.cli.output.values import plural
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.governance.keys import KeyDestruction, KeyRotation, SigningKeyRotation

PRESENTATION = Presentation()


@PRESENTATION.command("destroy")
def destroy(
    session: Session,
    workspace: Annotated[str, typer.Argument(metavar="WORKSPACE", help="A workspace: its name or id.")],
    *,
    yes: arguments.YES = False,
) -> None:
    """Destroy a workspace's data keys: its blobs can never be read again. This cannot be undone."""
    operation, given = all_operations()["keys.destroy"], {"workspace": workspace}
    parsing.check(operation, given)
    with session.platform() as platform:
        name = platform.workspaces.show(workspace).name
        question = f"The blobs of {name} can never be read again. Type the workspace's name to continue"
        confirm_by_name(question, name, yes=yes)
        present(session, operation, given, platform.keys.destroy(workspace))


@PRESENTATION.message("keys.rotate")
def _rotated(made: KeyRotation, given: Given) -> Message:
    return Message(f"root key {made.root} is in use; {plural(made.rewrapped, 'data key')} wrapped again")


@PRESENTATION.message("keys.rotate_signing")
def _signing_rotated(made: SigningKeyRotation, given: Given) -> Message:
    return Message(
        f"key {made.fingerprint} signs model versions from now on; "
        f"{plural(made.keys, 'key')} verify them. Copy the key file again, if you keep one offline"
    )


@PRESENTATION.message("keys.destroy")
def _destroyed(made: KeyDestruction, given: Given) -> Message:
    return Message(
        f"the keys of {made.workspace} are destroyed; nobody can read its {plural(made.blobs, 'blob')} again"
    )
