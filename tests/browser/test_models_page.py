"""Models in a browser: list, one model, one version, difference, approval and promotion, hostile texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import falaj as fj
from console_data import HOSTILE_CARD, FeatureData, make_features, make_version
from consoles import RunningConsole
from falaj.errors import Denied

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

VERSION = "/w/default/models/churn/versions/2"
PROMOTE, APPROVE, ROLLBACK = (f"[data-action='models.{verb}']" for verb in ("promote", "approve", "rollback"))


@pytest.fixture(scope="module")
def data(console: RunningConsole) -> FeatureData:
    """The model churn: champion is protected, points at the first version, and has a gate that the third fails."""
    platform = console.platform
    made = make_features(platform, "churn")
    make_version(platform, "churn", auc=0.90, card="The *first* one.", training_set=made.training.id)
    platform.models.promote("churn@1", to="champion")
    platform.models.set_gates("churn", alias="champion", metrics=("auc >= champion - 0.01",))
    make_version(platform, "churn", auc=0.93, card=HOSTILE_CARD, training_set=made.training.id)
    make_version(platform, "churn", auc=0.70, training_set=made.training.id)
    platform.models.protect("churn", alias="champion")
    return made


@pytest.fixture(scope="module")
def noor(console: RunningConsole) -> str:
    """The token of an approver."""
    return console.person("noor", "viewer", "approver")


@pytest.fixture
def noors_page(console: RunningConsole, noor: str) -> Iterator[Page]:
    """A page of a second browser, in which an approver is signed in."""
    context = console.signed_in(noor)
    yield context.new_page()
    context.close()


@pytest.mark.usefixtures("data")
def test_the_list_is_searched_and_leads_to_the_model(page: Page) -> None:
    page.goto("/w/default/models")
    page.get_by_label("Search models and aliases").fill("absent-name")
    page.get_by_text("No model has “absent-name”").wait_for()
    assert page.url.endswith("?q=absent-name")

    page.get_by_label("Search models and aliases").fill("CHUR")
    page.locator("td a", has_text="churn").click()

    page.get_by_role("heading", name="Versions").wait_for()
    assert page.url.endswith("/w/default/models/churn")
    assert page.get_by_text("churn@2 for champion").is_visible()


@pytest.mark.usefixtures("data")
def test_a_hostile_card_is_shown_and_runs_nothing(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))

    page.goto(f"{VERSION}?tab=card")
    page.get_by_text("bold words").wait_for()

    assert page.title() == "Model version · Falaj"
    assert page.locator(".prose script, .prose img, .prose [onerror]").count() == 0
    links = page.locator(".prose a").evaluate_all("all => all.map(each => each.getAttribute('href') || '')")
    assert not any(link.lower().startswith(("javascript", "data", "vbscript")) for link in links)
    assert not any("evil.example" in url for url in asked)
    assert "<script>" in page.locator(".prose").inner_text()


@pytest.mark.usefixtures("data")
def test_a_bill_of_materials_is_downloaded(page: Page, tmp_path: Path) -> None:
    page.goto(f"{VERSION}?tab=files")

    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()

    file = tmp_path / "bom.json"
    download.value.save_as(file)
    assert download.value.suggested_filename == "churn-2.cdx.json"
    assert json.loads(file.read_text())["bomFormat"] == "CycloneDX"


def test_lineage_leads_from_a_version_to_its_source(data: FeatureData, page: Page) -> None:
    page.goto(f"{VERSION}?tab=lineage")

    page.locator(".tree a", has_text="churn-training").click()
    page.wait_for_url("**/training-sets/churn-training")
    page.locator("canvas").first.wait_for()
    page.locator("td a", has_text="churn-calls").first.click()

    page.wait_for_url("**/features/churn-calls")
    page.get_by_text(data.calls.id).wait_for()


@pytest.mark.usefixtures("data")
def test_two_versions_are_compared(page: Page) -> None:
    page.goto("/w/default/models/churn/diff?before=1&after=2")

    page.get_by_role("cell", name="+0.03").wait_for()
    page.get_by_role("link", name="Swap").click()

    page.get_by_role("cell", name="-0.03").first.wait_for()
    assert page.url.endswith("before=2&after=1")


@pytest.mark.usefixtures("data")
def test_a_version_that_fails_its_gates_has_no_button(page: Page) -> None:
    page.goto("/w/default/models/churn/versions/3")

    page.get_by_text("churn@3 fails the gates").first.wait_for()

    assert page.locator(PROMOTE).count() == 0


@pytest.mark.usefixtures("data")
def test_who_may_not_promote_has_no_button_and_is_refused(console: RunningConsole) -> None:
    token = console.person("vera", "viewer")
    context = console.signed_in(token)
    page = context.new_page()

    page.goto(f"{VERSION}?alias=best")

    page.get_by_text("best points nowhere yet").wait_for()
    assert page.locator(f"{PROMOTE}, {APPROVE}").count() == 0
    page.goto("/w/default/models/churn")
    page.get_by_role("heading", name="Versions").wait_for()
    assert page.locator(ROLLBACK).count() == 0
    context.close()
    with fj.connect(console.api, token) as vera:
        with pytest.raises(Denied):
            vera.models.promote("churn@2", to="best")
        with pytest.raises(Denied):
            vera.models.approve("churn@2", alias="best")
        with pytest.raises(Denied):
            vera.models.rollback("churn", alias="champion")


@pytest.mark.usefixtures("data")
def test_a_second_person_approves_and_the_first_promotes_and_rolls_back(
    console: RunningConsole, page: Page, noors_page: Page
) -> None:
    page.goto(f"{VERSION}?alias=champion")
    page.get_by_text("churn@2 waits for the approval of someone else for champion.").wait_for()
    assert page.locator(f"{PROMOTE}, {APPROVE}").count() == 0  # the author neither promotes yet nor approves

    noors_page.goto(f"{VERSION}?alias=champion")
    noors_page.get_by_label("Comment kept with your approval").fill("better in <b>all</b>")
    noors_page.locator(APPROVE).click()
    noors_page.get_by_text("Approve churn@2 for champion of churn?").wait_for()
    noors_page.get_by_role("dialog").get_by_role("button", name="Approve for champion").click()
    noors_page.get_by_text("You approved churn@2 for champion.").wait_for()

    page.locator(PROMOTE).wait_for()  # without a reload
    assert page.get_by_role("cell", name="better in <b>all</b>").is_visible()
    page.locator(PROMOTE).click()
    page.get_by_role("dialog").get_by_role("button", name="Promote to champion").click()
    page.get_by_text("churn@2 is champion now.").first.wait_for()
    assert console.platform.models.resolve("churn", alias="champion").number == 2

    page.goto("/w/default/models/churn")
    page.locator(ROLLBACK).click()
    page.get_by_text("needs a new approval to return").wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Roll back to churn@1").click()
    page.get_by_text("champion is churn@1 again.").wait_for()
    assert console.platform.models.resolve("churn", alias="champion").number == 1
    change = console.platform.models.alias_history("churn", alias="champion").items[1]
    assert change.evidence is not None
    assert change.evidence.approved_by == ("noor",)
