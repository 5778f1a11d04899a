"""Pipelines in a browser: the graph follows a run, and buttons are there for those who may press them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import falaj as fj
from console_data import make_features, make_pipeline, make_version
from consoles import RunningConsole
from falaj.errors import Denied

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

PIPELINE = "/w/default/pipelines/bike-weekly"


@pytest.fixture(scope="module", autouse=True)
def _data(console: RunningConsole) -> None:
    make_features(console.platform, "bike")
    make_version(console.platform, "bike", auc=0.9)
    make_pipeline(console.platform, "bike", model="bike", view="bike-calls")


def test_who_may_not_start_has_no_button_and_is_refused(console: RunningConsole) -> None:
    token = console.person("layla", "viewer")
    context = console.signed_in(token)
    page = context.new_page()

    page.goto(PIPELINE)

    page.get_by_text("retrains bike and tries it on bike-endpoint").wait_for()
    assert page.locator("[data-action]").count() == 0
    context.close()
    with fj.connect(console.api, token) as layla, pytest.raises(Denied):
        layla.pipelines.start("bike-weekly")


def test_a_run_is_started_and_its_failed_step_is_shown(console: RunningConsole, page: Page) -> None:
    """The pipeline has no code, so its job fails: the graph says where."""
    page.goto(PIPELINE)
    page.locator("[data-action='pipelines.start']").click()
    page.get_by_text("It makes a training set, trains and registers a version of bike").wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Start").click()
    page.get_by_text("bike-weekly is started.").wait_for()

    page.locator("[data-step='train']").get_by_text("failed").wait_for()

    assert page.locator("[data-step='data']").get_by_text("done").is_visible()
    assert page.locator("[data-step='canary']").get_by_text("not reached").is_visible()
    run = console.platform.pipelines.show("bike-weekly").work
    assert run is not None
    assert console.platform.workflows.show(run).error is not None
