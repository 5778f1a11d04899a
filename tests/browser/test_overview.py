"""The overview in a browser: live, and readable in both themes and widths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consoles import RunningConsole

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_the_overview_shows_the_layers_of_the_platform(console: RunningConsole, page: Page) -> None:
    page.goto("/")

    page.wait_for_selector(".layers")

    assert page.url == f"{console.url}/w/default"
    names = page.locator(".layer-name").all_inner_texts()
    assert names == ["Integration", "Services", "Orchestration", "Hardware"]
    assert page.locator(".box", has_text="Controller").inner_text().split() == [
        "Controller",
        "check_circle",
        "acts",
    ]


def test_a_change_of_another_process_appears_without_a_reload(console: RunningConsole, page: Page) -> None:
    page.goto("/w/default")
    page.wait_for_selector(".layers")

    console.platform.experiments.create("appears-live")

    page.get_by_text("experiments create: appears-live").wait_for()
    assert "no experiment" not in page.locator(".box", has_text="Experiments").inner_text()
