"""A platform with its console, and a real browser that is signed in to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from consoles import RunningConsole, started_console
from polling import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page


@pytest.fixture(scope="session", autouse=True)
def patient() -> None:
    """Let assertions on a page wait as long as all tests do."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright: the package is not installed")
    playwright.expect.set_options(timeout=PATIENCE_S * 1000)


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
