"""One invocation of the command line: its global options, and the platform that it acts on."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falaj.apps.cli.options import GlobalOptions
from falaj.apps.cli.output.logs import log_to
from falaj.errors import FalajError, Fault, InvalidInput, NotFound
from falaj.records.places import default_home

if TYPE_CHECKING:
    from falaj.assembly.home import Home
    from falaj.sdk.platform import Platform  # not loaded by `falaj up`


@dataclass(frozen=True)
class Session:
    """The global options of a command; those after the command take precedence."""

    home: Path | None = None
    url: str | None = None
    json: bool = False
    creates_home: bool = False
    """Whether the command may create the home that it acts on; one that reads says that there is none."""

    @classmethod
    def of(cls, before: GlobalOptions, after: GlobalOptions, *, creates_home: bool = False) -> Session:
        home, url = after.home or before.home, after.url or before.url
        if home and url:
            raise InvalidInput("--home and --url name two platforms; give one of them")
        return cls(Path(home) if home else None, url, before.json or after.json, creates_home)

    def full_command(self, command: str) -> str:
        """Return `command` as it must be typed to reach the same platform."""
        options = [("--home", self.home), ("--url", self.url)]
        typed = "".join(f"{option} {shlex.quote(str(value))} " for option, value in options if value)
        return f"falaj {typed}{command}"

    def show(self, result: Any, for_people: Callable[[Any], None]) -> None:
        """Print `result` as JSON where --json was given, else with `for_people`."""
        if self.json:
            from falaj.apps.cli.output.results import show

            show(result, as_json=True)
        else:
            for_people(result)

    def platform(self) -> Platform:
        """Open the platform at the URL, else the one that runs on the home, else the home in this process."""
        url = self.url or (None if self.home else os.environ.get("FALAJ_URL"))
        if url:
            return remote_platform(url)
        return local_platform(self.home or default_home(), creates=self.creates_home)

    def running_platform(self) -> Platform | None:
        """Connect to the platform at the URL or to the one that runs on the home; none if there is neither."""
        url = self.url or (None if self.home else os.environ.get("FALAJ_URL"))
        if url is None:
            from falaj.assembly.home import find_home

            home = find_home(self.home or default_home())
            url = None if home is None else home.platform().get("url")
        return None if url is None else remote_platform(str(url))


def remote_platform(url: str) -> Platform:
    """Connect to the platform at `url`."""
    from falaj.sdk.remote import connect

    return connect(checked_url(url))


def checked_url(url: str) -> str:
    """Return `url` without a trailing slash; raise InvalidInput unless it is an HTTP address."""
    if not url.startswith(("http://", "https://")) or not url.isprintable() or " " in url:
        raise InvalidInput.at("url", given=url, allowed="an address that begins with http:// or https://")
    return url.rstrip("/")


def local_platform(path: Path, *, creates: bool = False) -> Platform:
    """Connect to the platform that runs on the home at `path`, or open the home in this process.

    NotFound where there is no home, unless the command `creates` one.
    """
    from falaj.assembly.home import find_home, open_home  # a remote platform needs none of this

    is_new = not (path / "id").exists()
    try:
        home = open_home(path) if creates else find_home(path)
    except OSError as error:
        raise InvalidInput.at(
            "home", given=str(path), allowed=f"a writable directory ({error.strerror})"
        ) from None
    if home is None:
        raise no_home(path)
    url = home.platform().get("url")
    if url and home.is_held():
        _renew_token(home, str(url))
        return remote_platform(str(url))
    from falaj.sdk.embedded import open_platform

    log_to(home.logs / "cli.log")
    platform = open_platform(path)
    if is_new:
        print(f"created a new home in {home.path}", file=sys.stderr)
    return platform


def no_home(path: Path) -> FalajError:
    """Return the error of a command that needs a home where there is none."""
    if path.exists() and not path.is_dir():
        return InvalidInput.at("home", given=str(path), allowed="a directory")
    return NotFound(
        f"there is no home at {path.absolute()}, nor in a folder above this one",
        faults=[
            Fault(
                where="home",
                given=str(path),
                allowed="the directory of a platform: --home DIR, FALAJ_HOME, or .falaj here or above",
                fix="falaj init creates one here, falaj up creates and starts it",
            )
        ],
    )


def _renew_token(home: Home, url: str) -> None:
    """Get the owner of the home a new token before theirs ends, so that they can never lock themselves out."""
    from falaj.sdk import credentials

    if not credentials.expires_within(url, credentials.RENEW_BEFORE):
        return
    from falaj.assembly.owner import renew_owner_token  # it loads the whole platform

    try:
        token = renew_owner_token(home)
    except FalajError:
        if credentials.expires_within(url, timedelta(0)):
            raise
        return  # the token is still valid: the next command tries again
    credentials.save(url, token.secret, expires_at=token.expires_at)
