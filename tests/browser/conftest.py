"""A real headless Chromium, and a platform with its console that it is signed in to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from consoles import RunningConsole, started_console

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium of the distribution, for one module: Playwright's loop runs in this thread meanwhile."""
    program = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("Chromium: the package chromium is not installed")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright: the package playwright is not installed"
    )
    pytest.importorskip("nicegui", reason="NiceGUI: the package nicegui is not installed")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def console(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """A platform with its console, for all tests of a module: use names of your own in it."""
    with started_console(tmp_path_factory.mktemp("console"), browser) as running:
        yield running


@pytest.fixture(scope="module")
def owner(console: RunningConsole) -> Iterator[BrowserContext]:
    """A wide browser in which the owner of the platform is signed in."""
    context = console.signed_in(console.token())
    yield context
    context.close()


@pytest.fixture
def page(owner: BrowserContext) -> Iterator[Page]:
    """A new page of the owner; errors of its scripts fail the test."""
    opened = owner.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    yield opened
    opened.close()
    assert problems == []
