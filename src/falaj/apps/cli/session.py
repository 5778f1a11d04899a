"""One invocation of the command line: its global options, and the platform that it acts on."""

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
    from falaj.sdk.platform import Platform  # not loaded by `falaj up`


@dataclass(frozen=True)
class Session:
    """The global options of a command; those after the command take precedence."""

    home: Path | None = None
    url: str | None = None
    json: bool = False

    @classmethod
    def of(cls, before: GlobalOptions, after: GlobalOptions) -> Session:
        home, url = after.home or before.home, after.url or before.url
        if home and url:
            raise InvalidInput("--home and --url name two platforms; give one of them")
        return cls(Path(home) if home else None, url, before.json or after.json)

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
        return remote_platform(url) if url else local_platform(self.home or default_home())


def remote_platform(url: str) -> Platform:
    """Connect to the platform at `url`."""
    from falaj.sdk.remote import connect

    return connect(checked_url(url))


def checked_url(url: str) -> str:
    """Return `url` without a trailing slash; raise InvalidInput unless it is an HTTP address."""
    if not url.startswith(("http://", "https://")) or not url.isprintable() or " " in url:
        raise InvalidInput.at("url", given=url, allowed="an address that begins with http:// or https://")
    return url.rstrip("/")


def local_platform(path: Path) -> Platform:
    """Connect to the platform that runs on the home at `path`, or open the home in this process."""
    from falaj.assembly.home import open_home  # a remote platform needs none of this
    from falaj.sdk.embedded import open_platform

    is_new = not (path / "id").exists()
    try:
        home = open_home(path)
    except OSError as error:
        raise InvalidInput.at(
            "home", given=str(path), allowed=f"a writable directory ({error.strerror})"
        ) from None
    url = home.platform().get("url")
    if url and home.is_held():
        return remote_platform(str(url))
    log_to(home.logs / "cli.log")
    platform = open_platform(path)
    if is_new:
        print(f"created a new home in {home.path}", file=sys.stderr)
    return platform
