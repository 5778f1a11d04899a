"""Endpoints and monitors in a browser: a request that is answered, live figures, drift, and who may act."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import falaj as fj
from console_run_data import infer, serve, watch
from consoles import RunningConsole, confirm, press
from falaj.errors import FalajError
from falaj.records.serving.endpoints import Route
from polling import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(console: RunningConsole, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An endpoint with two versions side by side, and a monitor whose last rows have drifted."""
    folder = tmp_path_factory.mktemp("served")
    serve(console.platform, folder, "arrivals")
    watch(console.platform, folder, "arrivals", rows=200)
    noise = np.random.default_rng(0)
    for shift in (0.0, 2.0):
        infer(console.platform, "arrivals", noise.normal((shift, 0, 0), 1, (250, 3)))
        eventually(
            lambda seen=shift: len(console.platform.monitoring.history("arrivals").windows) > (seen > 0),
        )
    eventually(lambda: console.platform.monitoring.alerts().items)
    routes = (Route(version="1", weight=50), Route(version="2", weight=50))
    console.platform.endpoints.route("arrivals", routes=routes)
    return "arrivals"


def test_an_endpoint_answers_a_request_of_its_form(console: RunningConsole, page: Page, served: str) -> None:
    page.goto(f"/w/default/endpoints/{served}")

    page.locator("[data-input=distance]").fill("1.5")
    page.locator("[data-action='endpoints.infer']").click()

    answer = page.locator("[data-part=answer]")
    answer.get_by_text("answered by").wait_for()
    answer.get_by_text("predictions_").wait_for()
    page.locator("[data-input=distance]").fill("<b>no number")
    page.locator("[data-action='endpoints.infer']").click()
    answer.get_by_text("a number", exact=True).wait_for()


def test_a_split_shows_the_evidence_and_is_rolled_back(
    console: RunningConsole, page: Page, served: str
) -> None:
    page.goto(f"/w/default/endpoints/{served}")
    page.get_by_text("Comparison (no canary is under way): version 2 beside version 1").wait_for()

    press(page.get_by_role("button", name="Roll back"), until=page.get_by_text("100 % to version 1").first)
    page.locator(".q-dialog").get_by_role("button", name="Roll back").click()

    eventually(lambda: len(console.platform.endpoints.show(served).routes) == 1)


def test_a_viewer_sees_figures_and_has_no_buttons(console: RunningConsole, served: str) -> None:
    token = console.person("endpoint-onlooker", "viewer")
    context = console.signed_in(token)
    page = context.new_page()
    page.goto(f"/w/default/endpoints/{served}")
    page.get_by_role("heading", name="Throughput").wait_for()

    assert page.locator("[data-action='endpoints.route']").count() == 0
    assert page.locator("[data-action='endpoints.infer']").count() == 1  # viewers may ask for predictions
    page.goto(f"/w/default/monitoring/{served}")
    page.get_by_role("heading", name="Drift of each column over time").wait_for()
    assert page.locator("[data-action]").count() == 0
    context.close()
    with fj.connect(console.api, token=token) as theirs, pytest.raises(FalajError):
        theirs.endpoints.route(served, routes=(Route(version="2", weight=100),))


def test_a_monitor_shows_drift_values_and_its_alert(console: RunningConsole, page: Page, served: str) -> None:
    page.goto(f"/w/default/monitoring/{served}?column=wind")

    page.locator("[data-part=histogram] .chart canvas").wait_for()
    label = page.locator("[data-part=histogram] .chart").get_attribute("aria-label")
    assert label == "Values of wind in the reference and now"
    page.get_by_role("row", name="distance drift").wait_for()
    confirm(page.locator("[data-action='monitoring.acknowledge']"), "Acknowledge")
    page.locator(".badge", has_text="acknowledged").wait_for()
