"""A platform that runs with its console, and browsers that are signed in to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

import falaj as fj
from console_pictures import window_size
from falaj.apps.supervisor import status
from polling import PATIENCE_S, eventually
from processes import children

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator

UP = "import sys; from falaj.apps.supervisor import up; sys.exit(up(port=0))"
PARTS = ("falaj.apps.api.server", "falaj.apps.controller.process", "falaj.apps.console.process")


@dataclass
class RunningConsole:
    """A platform that runs with its console."""

    home: Path
    process: subprocess.Popen[bytes]
    browser: Browser
    link: str
    """The sign-in link of the owner; good once."""
    platform: fj.Platform = field(init=False)

    @property
    def url(self) -> str:
        return f"http://{urlsplit(self.link).netloc}"

    @property
    def api(self) -> str:
        return str(status(self.home).url)

    def child(self, module: str) -> int | None:
        """Return the process id of a part."""
        return next(iter(children(self.process.pid, module)), None)

    def signed_in(self, token: str, *, width: str = "wide", dark: bool = False) -> BrowserContext:
        """Return a browser that is signed in with a token. It requests nothing of other hosts: a test checks that."""
        context = self.browser.new_context(
            viewport=window_size(width),
            color_scheme="dark" if dark else "light",
            timezone_id="Asia/Dubai",
            base_url=self.url,
        )
        context.set_default_timeout(PATIENCE_S * 1000)
        page = context.new_page()
        page.goto("/signin")
        page.fill("#token", token)
        page.click("button[type=submit]")
        page.wait_for_url("**/w/**")
        page.close()
        return context

    def token(self, user: str | None = None, **options: Any) -> str:
        """Return a new token of the owner, or of another user."""
        return self.platform.tokens.issue(purpose="browser test", user=user, **options).secret

    def person(self, name: str, *roles: str, workspace: str = "default") -> str:
        """Return the token of a new user with these roles."""
        self.platform.users.create(name)
        for role in roles:
            self.platform.workspaces.grant(workspace, name, role=role)
        return self.token(name)


@contextmanager
def started_console(folder: Path, browser: Browser) -> Iterator[RunningConsole]:
    """Start a platform with its console in `folder`, and wait until both answer."""
    home, printed = folder / "home", folder / "printed"
    environment = {
        **os.environ,
        "FALAJ_HOME": str(home),
        "FALAJ_CONFIG_DIR": str(folder / "config"),
        "FALAJ_CONSOLE": "on",
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        printed.open("w") as out,
        subprocess.Popen([sys.executable, "-c", UP], env=environment, stdout=out, stderr=out) as process,
    ):
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        patch.delenv("FALAJ_TOKEN", raising=False)
        try:
            found = eventually(lambda: re.search(r"sign in +(http\S+)", printed.read_text()))
            eventually(lambda: status(home).ready)
            running = RunningConsole(home, process, browser, found[1])
            with fj.connect(running.api) as running.platform:
                yield running
            process.terminate()
            process.wait(PATIENCE_S)
        finally:
            for pid in [process.pid, *(pid for part in PARTS for pid in children(process.pid, part))]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


AGAIN_MS = 7_000
"""After so long a button is pressed again."""


def press(button: Locator, *, until: Locator) -> None:
    """Press a button until what it shows is seen: a press that meets a redraw of its part of the page is lost."""
    from playwright.sync_api import TimeoutError as NotSeen

    for _ in range(4):
        button.click()
        with suppress(NotSeen):
            until.wait_for(timeout=AGAIN_MS)
            return
    until.wait_for()


def confirm(button: Locator, label: str) -> None:
    """Press a button, and the one named `label` in the dialog that asks first."""
    agree = button.page.locator(".q-dialog").get_by_role("button", name=label)
    press(button, until=agree)
    agree.click()


def shows(locator: Locator, *texts: str) -> None:
    """Wait until the elements show these texts, also across a reload of the page."""
    from playwright.sync_api import expect

    expect(locator).to_have_text([*texts])
