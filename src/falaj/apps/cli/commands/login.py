"""`falaj login`: by a sign-in link, or by a token that is typed and not shown."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.session import Session, checked_url
from falaj.errors import InvalidInput
from falaj.sdk.credentials import save, sign_in
from falaj.sdk.remote import connect


def login(
    session: Session,
    link: Annotated[str, typer.Argument(metavar="URL[#CODE]", help="An address, or a sign-in link.")],
    *,
    token: Annotated[
        bool, typer.Option("--token", help="Ask for a token, or read it from standard input.")
    ] = False,
) -> None:
    """Sign in to a platform, and keep the credential for this address."""
    address, _, fragment = link.partition("#")
    url, code = checked_url(address), fragment.removeprefix("code=")
    if bool(code) == token:
        raise InvalidInput.at(
            "URL",
            given=link,
            allowed="a sign-in link (URL#code=…), or an address and --token",
            fix=f"falaj login {address} --token",
        )
    name = _keep_token(url) if token else sign_in(url, code)
    print(f"signed in to {url} as {name}\n  next   falaj --url {url} user whoami")


def _keep_token(url: str) -> str:
    """Keep a token if the platform at `url` takes it; the name of whose it is."""
    given = typer.prompt("Token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    secret = given.strip()
    if not secret:
        raise InvalidInput("no token was given; falaj tokens issue makes one")
    with connect(url, secret) as platform:
        name = platform.users.whoami().principal.name
    save(url, secret)
    return name


COMMANDS = {"login": partial(command, "login", login, prints=False)}
