"""`falaj login`: sign in with a link, or with a token that is read from a hidden prompt or stdin."""

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
    link: Annotated[
        str | None,
        typer.Argument(
            metavar="URL[#CODE]",
            help="An address, or a sign-in link. Without it: a new token for the owner of the home.",
        ),
    ] = None,
    *,
    token: Annotated[
        bool, typer.Option("--token", help="Ask for a token, or read it from standard input.")
    ] = False,
) -> None:
    """Sign in to a platform, and save the credential for this address."""
    if link is None:
        _renew(session)
        return
    address, _, fragment = link.partition("#")
    url, code = checked_url(address), fragment.removeprefix("code=")
    if bool(code) == token:
        raise InvalidInput.at(
            "URL",
            given=link,
            allowed="a sign-in link (URL#code=…), or an address and --token",
            fix=f"falaj login {address} --token",
        )
    url, name = (url, _save_token(url)) if token else sign_in(url, code)
    print(f"signed in to {url} as {name}\n  next   falaj --url {url} users whoami")


def _renew(session: Session) -> None:
    """Save a new token for the platform that runs on the home, whose owner needs none to get it."""
    from falaj.assembly.home import find_home
    from falaj.assembly.owner import renew_owner_token
    from falaj.assembly.platform import local_user

    home = None if session.url else find_home(session.home)
    if home is None:
        raise InvalidInput.at(
            "URL", given="nothing", allowed="an address, or a home on this machine: --home DIR"
        )
    url = home.platform().get("url")
    if url is None:
        print(f"no platform runs on {home.path}: its owner needs no token there")
        return
    token = renew_owner_token(home)
    save(str(url), token.secret, expires_at=token.expires_at)
    print(f"signed in to {url} as {local_user()}, until {token.expires_at:%Y-%m-%d}")


def _save_token(url: str) -> str:
    """Save a token if the platform at `url` accepts it; return the name of its user."""
    given = typer.prompt("Token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    secret = given.strip()
    if not secret:
        raise InvalidInput("no token was given; issue one with falaj tokens issue")
    with connect(url, secret) as platform:
        name = platform.users.whoami().principal.name
    save(url, secret)
    return name


COMMANDS = {"login": partial(command, "login", login, prints=False)}
