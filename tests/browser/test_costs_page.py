"""Costs in a browser: chosen by address, and downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from consoles import RunningConsole

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow


def used(console: RunningConsole, folder: Path, name: str) -> None:
    (folder / "train.py").write_text("import time; time.sleep(0.5)")
    job = console.platform.train(folder / "train.py", name=name)
    for _ in console.platform.jobs.wait(job.id):
        pass


def test_usage_is_shown_by_job_with_its_address(console: RunningConsole, page: Page, tmp_path: Path) -> None:
    used(console, tmp_path, "that-costs")

    page.goto("/w/default/costs?by=job&span=7d&scope=here")

    link = page.get_by_role("link", name="default/that-costs")
    link.wait_for()
    page.locator(".chooser").first.click()
    page.get_by_role("option", name="by user").click()
    page.wait_for_url("**/costs?by=user&span=7d&scope=here")
    page.locator(".data-table th", has_text="User").wait_for()
    page.go_back()
    link.wait_for()
    link.click()
    page.wait_for_url("**/jobs/job_*")


def test_the_charges_are_downloaded_as_csv(console: RunningConsole, page: Page, tmp_path: Path) -> None:
    used(console, tmp_path, "that-is-charged")
    page.goto("/w/default/costs")

    with page.expect_download() as started:
        page.get_by_role("button", name="Download CSV").click()

    text = Path(started.value.path()).read_text()
    assert "BillingPeriodStart" in text.splitlines()[0]
    assert "that-is-charged" in text


def test_a_viewer_sees_their_costs_and_no_button_for_budgets(console: RunningConsole) -> None:
    context = console.signed_in(console.person("costs-viewer", "viewer"))
    page = context.new_page()

    page.goto("/w/default/costs")

    page.locator(".figures").wait_for()
    page.wait_for_function("window.did_handshake")
    assert page.locator("[data-action]").count() == 0
    context.close()
