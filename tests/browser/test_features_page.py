"""Features in a browser: the catalogue, one view with its histograms, and training sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from console_data import FeatureData, make_features, make_quarantine
from consoles import RunningConsole
from falaj.records.features import ColumnType, Entity, Feature, FeatureView

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

VIEW = "/w/default/features/taxi-calls"


@pytest.fixture(scope="module")
def data(console: RunningConsole) -> FeatureData:
    return make_features(console.platform, "taxi")


@pytest.mark.usefixtures("data")
def test_a_view_that_is_applied_appears_and_is_found(console: RunningConsole, page: Page) -> None:
    page.goto("/w/default/features?q=taxi")
    page.locator("td a", has_text="taxi-calls").wait_for()

    fares = FeatureView(
        name="taxi-fares", entities=("taxi-customer",), columns=(Feature(name="fare", type=ColumnType.FLOAT),)
    )
    console.platform.apply([Entity(name="taxi-customer", key="customer"), fares])

    page.locator("td a", has_text="taxi-fares").wait_for()
    page.get_by_label("Search names").fill("minutes_7d taxi")
    page.get_by_text("1 of ").wait_for()
    assert page.locator("td a").all_inner_texts() == ["taxi-calls"]


def test_a_view_shows_definition_versions_and_readers(data: FeatureData, page: Page) -> None:
    page.goto(VIEW)

    page.get_by_text("+ roaming, + minutes_7d").wait_for()
    assert page.get_by_text(data.calls.id).is_visible()
    page.get_by_role("link", name="Access").click()
    page.get_by_role("cell", name="owner").wait_for()
    assert page.url.endswith("?tab=access")
    page.go_back()
    page.get_by_role("heading", name="Freshness").wait_for()


@pytest.mark.usefixtures("data")
def test_histograms_are_drawn_from_the_rows_and_hostile_values_are_words(page: Page) -> None:
    page.goto(f"{VIEW}?tab=distributions")

    page.get_by_text("Of all 400 rows.").wait_for()
    page.locator("canvas").first.wait_for()

    assert page.locator(".chart").count() == 4
    assert page.get_by_text("float · 0 to 36, median 18 · 10.0% empty").is_visible()
    assert page.locator("img[src='x']").count() == 0


@pytest.mark.usefixtures("data")
def test_the_online_store_is_written_from_the_page(console: RunningConsole, page: Page) -> None:
    page.goto(VIEW)
    page.locator("[data-action='features.materialize']").click()
    page.get_by_role("dialog").get_by_role("button", name="Write to the online store").click()

    page.get_by_text("the online store has the newest rows").wait_for()

    assert console.platform.features.show("taxi-calls").online_version is not None


@pytest.mark.usefixtures("data")
def test_a_viewer_sees_neither_the_button_nor_the_audit_log(console: RunningConsole) -> None:
    context = console.signed_in(console.person("faris", "viewer"))
    page = context.new_page()

    page.goto(VIEW)

    page.get_by_text("Who may read the audit log sees the refused files here.").wait_for()
    assert page.locator("[data-action]").count() == 0
    context.close()


def test_quarantined_rows_are_shown_and_acted_on(console: RunningConsole, page: Page) -> None:
    make_quarantine(console.platform, "metro")
    viewer = console.signed_in(console.person("hind", "viewer"))
    seen = viewer.new_page()
    seen.goto("/w/default/features/metro-visits?tab=quarantine")
    seen.get_by_role("cell", name="5000.0").or_(seen.get_by_role("cell", name="5000")).first.wait_for()
    assert seen.locator("[data-action]").count() == 0
    viewer.close()
    page.goto("/w/default/features/metro-visits?tab=quarantine")
    page.get_by_role("link", name="metro-visits-1").click()
    page.get_by_role("cell", name="many").wait_for()
    assert page.locator("img[src='x']").count() == 0
    wider = console.platform.features.show("metro-visits").definition
    minutes = wider.columns[0].model_copy(update={"min": -10})
    console.platform.apply([wider.model_copy(update={"columns": (minutes,)})])

    page.locator("[data-action='features.ingest_quarantined']").click()
    page.get_by_role("dialog").get_by_role("button", name="Ingest again").click()
    page.get_by_text("2 of 3").wait_for()
    page.locator("[data-action='features.discard_quarantined']").click()
    page.get_by_role("dialog").get_by_role("button", name="Discard").click()

    page.get_by_text("1 ingested, 2 discarded").wait_for()
    assert console.platform.features.show("metro-visits").rows == 5


@pytest.mark.usefixtures("data")
def test_an_unknown_view_is_an_error_in_the_words_of_the_platform(page: Page) -> None:
    page.goto("/w/default/features/absent-view")

    page.get_by_role("alert").get_by_text("absent-view").first.wait_for()
