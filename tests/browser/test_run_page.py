"""One run, and runs side by side, in a browser: live curves, artifacts, actions, and texts of strangers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import falaj as fj
from console_run_data import HOSTILE, log_run
from consoles import RunningConsole, press
from falaj.errors import FalajError
from falaj.records.tracking import MetricPoint

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(console: RunningConsole) -> list[str]:
    """Three runs that have ended."""
    return [log_run(console.platform, f"run {lr}", lr=lr) for lr in (0.001, 0.01, 0.1)]


def test_a_run_shows_its_curves_and_what_was_logged(
    console: RunningConsole, page: Page, runs: list[str]
) -> None:
    page.goto(f"/w/default/runs/{runs[0]}?smoothing=0.6&scale=log")

    page.get_by_role("heading", name="loss", exact=True).wait_for()
    assert page.locator(".chart canvas").count() == 2
    assert page.locator(".chart").first.get_attribute("aria-label") == "accuracy: 1 curves of 200 points"
    page.get_by_text("600 points").wait_for()
    page.get_by_text("flights-2026").wait_for()
    page.get_by_text("0a1b2c3d4e5f").first.wait_for()
    assert page.locator(".q-toggle", has_text="Log scale").get_attribute("aria-checked") == "true"


def test_points_that_are_logged_while_the_page_is_open_appear(console: RunningConsole, page: Page) -> None:
    run = log_run(console.platform, "live", steps=10, ends=False)
    page.goto(f"/w/default/runs/{run}?metrics=accuracy")
    page.get_by_text("10 points").first.wait_for()

    console.platform.runs.log_metrics(run, (MetricPoint(key="accuracy", value=0.5, step=11),))
    page.get_by_text("11 points").first.wait_for()
    console.platform.runs.end(run)

    page.locator(".badge", has_text="finished").wait_for()


def test_artifacts_are_shown_and_never_run(console: RunningConsole, page: Page, runs: list[str]) -> None:
    shown = {
        "plots/roc.svg": "img",
        "plots/dot.png": "img",
        "plots/no.png": "text=not a PNG",
        "rows.csv": "td:has-text('<script>')",
        "rows.parquet": "text=3 rows",
        "report.html": "text=<h1>report</h1>",
        "weights.bin": "text=not shown",
    }
    page.goto(f"/w/default/runs/{runs[0]}")

    for path, expected in shown.items():
        page.locator(f"[data-artifact='{path}']").click()
        panel = page.locator("[data-part=artifact]", has=page.get_by_role("heading", name=path))
        panel.locator(expected).first.wait_for()

    assert page.evaluate("window.harmed") is None
    assert "artifact=weights.bin" in page.url


def test_hostile_names_are_shown_as_text(console: RunningConsole, page: Page) -> None:
    run = console.platform.runs.start("vision", name=HOSTILE, params={"a": HOSTILE}, tags={"b": HOSTILE}).id
    console.platform.runs.upload_artifact(run, "a'\"><img src=x onerror=window.harmed=1>.txt", iter([b"x"]))

    page.goto(f"/w/default/runs/{run}")

    page.get_by_role("heading", name="<script>").wait_for()
    page.get_by_text("onerror").first.click()
    page.locator("[data-part=artifact]").wait_for()
    assert page.evaluate("window.harmed") is None
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_a_run_is_tagged_deleted_and_restored(console: RunningConsole, page: Page) -> None:
    run = log_run(console.platform, "to delete", steps=2)
    page.goto(f"/w/default/runs/{run}")

    page.get_by_label("Tag", exact=True).fill("reviewed")
    page.get_by_label("Value", exact=True).fill("yes")
    page.get_by_role("button", name="Set").click()
    page.get_by_label("Delete the tag reviewed").wait_for()
    asked = page.get_by_text("It can be restored until then")
    press(page.locator("[data-action='runs.delete']"), until=asked)
    page.locator(".q-dialog").get_by_role("button", name="Delete").click()
    page.locator("[data-action='runs.restore']").click()
    page.locator("[data-action='runs.delete']").wait_for()

    assert console.platform.runs.show(run).run.deleted_at is None


def test_who_may_only_look_has_no_buttons_and_is_refused(console: RunningConsole, runs: list[str]) -> None:
    token = console.person("onlooker", "viewer")
    context = console.signed_in(token)
    page = context.new_page()
    page.goto(f"/w/default/runs/{runs[0]}")
    page.get_by_role("heading", name="loss", exact=True).wait_for()

    assert page.locator("[data-action]").count() == 0
    context.close()
    with fj.connect(console.api, token=token) as theirs, pytest.raises(FalajError):
        theirs.runs.delete(runs[0])


def test_runs_are_compared(console: RunningConsole, page: Page, runs: list[str]) -> None:
    page.goto(f"/w/default/compare?runs={','.join(runs)}")

    page.get_by_role("heading", name="Parallel coordinates").wait_for()
    page.get_by_role("row", name="lr").wait_for()
    assert page.get_by_role("row", name="batch").count() == 0
    page.get_by_text("Only those that differ").click()
    page.get_by_role("row", name="batch").wait_for()
    page.get_by_text("1,800 points").wait_for()


def test_many_points_are_plotted_with_their_peaks(console: RunningConsole, page: Page) -> None:
    run = console.platform.runs.start("vision", name="long").id
    for begin in range(0, 20_000, 5000):
        points = (
            MetricPoint(key="loss", value=99.0 if step == 7777 else 1.0, step=step)
            for step in range(begin, begin + 5000)
        )
        console.platform.runs.log_metrics(run, tuple(points))

    page.goto(f"/w/default/runs/{run}")

    page.get_by_text("20,000 points, drawn as").wait_for()
    page.get_by_role("cell", name="99", exact=True).wait_for()
