"""The table of runs in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from consoles import RunningConsole, shows

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=\"document.title='pwned'\">{{constructor.constructor('1')()}}`${1}`"


def test_runs_are_sorted_by_the_api_and_the_back_button_leads_back(
    console: RunningConsole, page: Page
) -> None:
    platform = console.platform
    platform.experiments.create("sorted")
    for number, auc in enumerate((0.7, 0.9, 0.8)):
        started = platform.runs.start("sorted", name=f"sorted-{number}")
        platform.runs.log_batch(started.id, metrics=[{"key": "auc", "value": auc, "step": 1}])
    found = platform.experiments.find("sorted")
    page.goto(f"/w/default/runs?experiment={found.id}")
    names = page.locator(".data-table tbody tr .cell-link")
    shows(names, "sorted-2", "sorted-1", "sorted-0")

    page.locator(".data-table th", has_text="auc").click()

    shows(names, "sorted-0", "sorted-2", "sorted-1")
    assert "sort=metrics.auc" in page.url
    page.go_back()
    shows(names, "sorted-2", "sorted-1", "sorted-0")


def test_hostile_names_are_shown_as_they_are_written(console: RunningConsole, page: Page) -> None:
    platform = console.platform
    platform.experiments.create("hostile")
    started = platform.runs.start("hostile", name=HOSTILE, params={"lr": HOSTILE})
    platform.runs.log_batch(started.id, metrics=[{"key": "a b", "value": 1.0, "step": 1}])
    found = platform.experiments.find("hostile")

    page.goto(f"/w/default/runs?experiment={found.id}&params=lr")

    page.locator(".data-table .cell-link").wait_for()
    assert page.locator(".data-table .cell-link").inner_text() == HOSTILE
    assert "pwned" not in page.title()
    assert page.locator("img").count() == 0


def test_a_filter_that_is_wrong_is_answered_in_the_words_of_the_platform(
    console: RunningConsole, page: Page
) -> None:
    page.goto("/w/default/runs?filter=metrics.")

    page.locator("[role=alert]").wait_for()

    assert "allowed" in page.locator("[role=alert]").inner_text()
