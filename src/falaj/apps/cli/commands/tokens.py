"""`falaj tokens issue`: the secret alone goes to stdout, so that a script can take it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import format_value
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations

HELP = arguments.HELP


def issue(
    session: Session,
    *,
    purpose: Annotated[str, typer.Option(metavar="PURPOSE", help=HELP["purpose"])],
    user: Annotated[str | None, typer.Option(metavar="USER", help="Whose it is. (default: yours)")] = None,
    workspace: Annotated[
        str | None, typer.Option(metavar="WORKSPACE", help="Confine it to this workspace.")
    ] = None,
    actions: Annotated[
        list[str] | None, typer.Option("--action", metavar="ACTION", help=HELP["actions"])
    ] = None,
    expires_in: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long it holds, such as 12h. (default: 30d)")
    ] = None,
) -> None:
    """Issue a token for yourself or, as an administrator, for a user. Its secret is shown this once."""
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
        f"  note   the secret is shown this once; keep it in FALAJ_TOKEN\n"
        f"  undo   {session.full_command(f'tokens revoke {token.id}')}",
        file=sys.stderr,
    )


GROUP_COMMANDS = {"issue": issue}
