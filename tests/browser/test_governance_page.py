"""Governance in a browser: proofs, refusals, who can do what, tokens, people and webhooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import falaj as fj
from consoles import RunningConsole, confirm
from falaj.errors import Denied

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

HOSTILE = "<script>document.title='pwned'</script>\"'>{{constructor}}"
PARTS = ("audit", "residency", "policies", "keys", "people", "groups", "tokens", "webhooks")


def test_the_log_is_searched_verified_and_proved(console: RunningConsole, page: Page) -> None:
    console.platform.put("proved", b"bytes")
    page.goto("/w/default/governance/audit?action=blobs.commit")
    page.locator(".data-table").wait_for()
    assert {*page.locator("td:nth-child(4)").all_inner_texts()} == {"blobs.commit"}

    page.locator("[data-action='audit.verify']").click()

    page.locator("[data-part=verdict]", has_text="sound").wait_for()
    page.locator(".data-table .cell-link").first.click()
    proof = page.locator("[data-part=inclusion]")
    proof.wait_for()
    assert "is in the log" in proof.inner_text()
    hashes = dict(
        zip(proof.locator("dt").all_inner_texts(), proof.locator("dd").all_inner_texts(), strict=True)
    )
    assert hashes["Folded"] == hashes["Signed root"]
    assert "the log only grew" in page.locator("[data-part=consistency]").inner_text()


def test_a_person_without_the_right_is_told_so_and_has_no_button(console: RunningConsole) -> None:
    token = console.person("gov-viewer", "viewer")
    context = console.signed_in(token)
    page = context.new_page()

    for part in ("audit", "keys", "webhooks"):
        page.goto(f"/w/default/governance/{part}")
        page.locator("[role=alert]").first.wait_for()
        assert "policy.denied" in page.locator("[role=alert]").first.inner_text()
        assert page.locator("[data-action]").count() == 0
    for part in ("people", "groups", "policies"):
        page.goto(f"/w/default/governance/{part}")
        page.locator(".panel, .state-card").first.wait_for()
        page.wait_for_function("window.did_handshake")
        assert page.locator("[data-action]").count() == 0
    with fj.connect(console.api, token=token) as theirs:
        for refused in (
            lambda: theirs.audit.inclusion_proof(1),
            lambda: theirs.users.create("mallory"),
            lambda: theirs.keys.rotate(),
            lambda: theirs.policies.who_can("blobs.read", "workspace:default"),
        ):
            with pytest.raises(Denied):
                refused()
    context.close()


def test_who_can_do_what_is_answered_and_has_an_address(console: RunningConsole, page: Page) -> None:
    console.person("may-submit", "developer")

    page.goto("/w/default/governance/policies?action=jobs.submit&object=workspace:default")

    row = page.locator("[data-part=who-can] tr", has_text="may-submit")
    row.wait_for()
    assert "role.developer" in row.inner_text()


def test_a_refused_attempt_is_shown(console: RunningConsole, page: Page) -> None:
    with pytest.raises(Denied):
        console.platform.put("abroad", b"x", only=["SA"])

    page.goto("/w/default/governance/residency")

    page.locator("[data-part=refused] tr", has_text="blobs.upload").first.wait_for()


def test_a_restricted_object_is_shown_and_asked_about(console: RunningConsole, page: Page) -> None:
    console.platform.put("at-home", b"x", only=["AE"], classes=["personal"])

    page.goto("/w/default/governance/residency")

    row = page.locator("tr", has_text="at-home")
    row.wait_for()
    assert "only AE; personal" in row.inner_text()
    page.get_by_label("Object", exact=True).fill("blob:at-home")
    page.get_by_role("button", name="Check").click()
    page.get_by_text("blob:at-home may be stored in").wait_for()


def test_a_token_is_issued_shown_once_and_revoked(console: RunningConsole, page: Page) -> None:
    page.goto("/w/default/governance/tokens")

    page.get_by_label("Purpose").fill(HOSTILE)
    page.locator("[data-action='tokens.issue']").click()
    dialog = page.locator(".q-dialog", has_text="The secret of the token")
    secret = dialog.locator(".command .mono").inner_text()
    with fj.connect(console.api, token=secret) as theirs:
        assert theirs.users.whoami().principal.name
    dialog.get_by_role("button", name="Close").click()
    dialog.wait_for(state="detached")
    assert secret not in page.content()
    line = page.locator("[data-part=token]", has_text=HOSTILE)
    confirm(line.get_by_role("button", name="Revoke"), "Revoke")

    line.get_by_text("revoked").wait_for()
    assert page.title() == "Tokens · Falaj"
    with pytest.raises(fj.FalajError), fj.connect(console.api, token=secret) as theirs:
        theirs.users.whoami()


def test_people_are_made_granted_and_disabled(console: RunningConsole, page: Page) -> None:
    page.goto("/w/default/governance/people")

    page.get_by_label("Name", exact=True).fill("new-person")
    page.locator("[data-action='users.create']").click()
    line = page.locator(".person-line", has_text="new-person")
    line.get_by_role("button", name="Grant").click()
    page.locator(".q-menu .q-item", has_text="approver").click()
    line.locator(".chip", has_text="approver").wait_for()
    confirm(line.get_by_role("button", name="Disable"), "Disable")

    line.get_by_text("disabled").wait_for()
    assert console.platform.users.show("new-person").disabled


def test_a_hostile_policy_and_webhook_are_shown_as_text(console: RunningConsole, page: Page) -> None:
    text = 'forbid (principal, action == Action::"blobs.read", resource) when { resource.name == "<img src=x>" };'
    console.platform.policies.publish("hostile-text", text=text, workspace="default")

    page.goto("/w/default/governance/policies")

    page.get_by_text("<img src=x>").wait_for()
    assert page.locator("main img").count() == 0
    console.platform.policies.withdraw("default/hostile-text")
    page.get_by_text("<img src=x>").wait_for(state="detached")
