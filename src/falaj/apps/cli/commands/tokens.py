"""`falaj tokens`: issue and revoke tokens. The secret alone goes to stdout, so that a script can read it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import format_value
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.governance.identity import SignInLink, Token

PRESENTATION = Presentation(
    columns={Token: ("id", "principal", "purpose", "workspace", "actions", "expires_at", "revoked_at")},
    help={
        "actions": "Actions that it allows, such as blobs.read or blobs.*",
        "expires_in": "How long it is valid.",
        "purpose": "What it is for; shown in the list of tokens.",
    },
    examples={"actions": "blobs.read", "expires_in": "30d"},
)


@PRESENTATION.command("issue")
def issue(
    session: Session,
    *,
    purpose: Annotated[str, typer.Option(metavar="PURPOSE", help=PRESENTATION.help["purpose"])],
    user: Annotated[
        str | None, typer.Option(metavar="USER", help="The user that it is for. (default: yourself)")
    ] = None,
    workspace: Annotated[
        str | None, typer.Option(metavar="WORKSPACE", help="Restrict it to this workspace.")
    ] = None,
    actions: Annotated[
        list[str] | None, typer.Option("--action", metavar="ACTION", help=PRESENTATION.help["actions"])
    ] = None,
    expires_in: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long it is valid, such as 12h. (default: 30d)")
    ] = None,
) -> None:
    """Issue a token for yourself or, as an administrator, for a user. Its secret is shown only once."""
    operation = all_operations()["tokens.issue"]
    typed = {
        "purpose": purpose,
        "user": user,
        "workspace": workspace,
        "actions": actions,
        "expires_in": expires_in,
    }
    given = parsing.parse(operation, typed)
    parsing.check(operation, given)
    with session.platform() as platform:
        issued = platform.tokens.issue(**given)
    if session.json:
        show(issued, as_json=True)
        return
    token = issued.token
    print(issued.secret)
    print(
        f"token {token.id} for {token.principal} ({token.purpose}), until {format_value(token.expires_at)}\n"
        f"  note   the secret is shown only once; put it in FALAJ_TOKEN\n"
        f"  undo   {session.full_command(f'tokens revoke {token.id}')}",
        file=sys.stderr,
    )


@PRESENTATION.message("tokens.revoke")
def _token_revoked(made: Token, given: Given) -> Message:
    return Message(f"token {made.id} of {made.principal} ({made.purpose}) is revoked")


@PRESENTATION.message("tokens.sign_in_link")
def _linked(made: SignInLink, given: Given) -> Message:
    return Message(
        f"{made.code}\nThis code signs in once, until {format_value(made.expires_at)}.",
        (("next", f"login URL#code={made.code}"),),
    )
