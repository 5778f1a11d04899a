"""One invocation of the command line: what was asked for globally, and which platform is meant."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falaj.apps.cli.options import GlobalOptions
from falaj.apps.cli.output.logs import log_to
from falaj.errors import InvalidInput
from falaj.records.places import default_home

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform  # `falaj up` has no use for it, and stays small


@dataclass(frozen=True)
class Session:
    """What a command is handed: the global options. Those behind the command are preferred."""

    home: Path | None = None
    url: str | None = None
    json: bool = False

    @classmethod
    def of(cls, before: GlobalOptions, behind: GlobalOptions) -> Session:
        home, url = behind.home or before.home, behind.url or before.url
        if home and url:
            raise InvalidInput("--home and --url name two platforms; give one of them")
        return cls(Path(home) if home else None, url, before.json or behind.json)

    def full_command(self, command: str) -> str:
        """`command` as it must be typed to reach the same platform."""
        words = [("--home", self.home), ("--url", self.url)]
        named = "".join(f"{option} {shlex.quote(str(value))} " for option, value in words if value)
        return f"falaj {named}{command}"

    def show(self, result: Any, for_people: Callable[[Any], None]) -> None:
        """`result` as JSON where it was asked for, else in the form for people."""
        if self.json:
            from falaj.apps.cli.output.results import show

            show(result, as_json=True)
        else:
            for_people(result)

    def platform(self) -> Platform:
        """The platform that is meant: the one at the URL, else the one that runs on the home, else the home itself."""
        url = self.url or (None if self.home else os.environ.get("FALAJ_URL"))
        return remote_platform(url) if url else local_platform(self.home or default_home())


def remote_platform(url: str) -> Platform:
    """The platform at `url`."""
    from falaj.sdk.remote import connect

    return connect(checked_url(url))


def checked_url(url: str) -> str:
    """`url` without a slash at its end, if it is one."""
    if not url.startswith(("http://", "https://")) or not url.isprintable() or " " in url:
        raise InvalidInput.at("url", given=url, allowed="an address that begins with http:// or https://")
    return url.rstrip("/")


def local_platform(path: Path) -> Platform:
    """The platform that runs on the home at `path`, or else the home itself."""
    from falaj.assembly.home import open_home  # far from a home, none of this is loaded
    from falaj.sdk.embedded import open_platform

    is_new = not (path / "id").exists()
    try:
        home = open_home(path)
    except OSError as error:
        raise InvalidInput.at(
            "home", given=str(path), allowed=f"a directory that you may write to ({error.strerror})"
        ) from None
    url = home.platform().get("url")
    if url and home.is_held():
        return remote_platform(str(url))
    log_to(home.logs / "cli.log")
    platform = open_platform(path)
    if is_new:
        print(f"made a new home in {home.path}", file=sys.stderr)
    return platform
