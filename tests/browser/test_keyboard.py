"""The console without a mouse: Tab reaches every control, focus is seen, Enter and Space act, Escape leads back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from console_data import make_version
from console_run_data import log_run
from consoles import RunningConsole
from polling import let_pass

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

pytestmark = pytest.mark.slow
CONTROLS = """
() => {
  const focusable = 'a[href], button, input, select, textarea, [tabindex]';
  const seen = (e) => e.checkVisibility({ visibilityProperty: true }) && e.getBoundingClientRect().width > 0 &&
    !e.closest('[inert], [aria-hidden=true]');
  const words = (e) => (e.getAttribute('aria-label') || e.innerText || e.name || e.tagName).trim().slice(0, 40);
  const reachable = (e) => e.tabIndex >= 0 && !e.disabled && e.getAttribute('aria-disabled') !== 'true';
  const wanted = [...document.querySelectorAll(focusable)].filter((e) => seen(e) && reachable(e));
  wanted.forEach((e, at) => { e.dataset.at = at; });
  const isPointer = (e) => e && getComputedStyle(e).cursor === 'pointer';
  const mouseOnly = [...document.querySelectorAll('body *')].filter((e) =>
    isPointer(e) && !isPointer(e.parentElement) && seen(e) && !e.closest('.disabled, canvas, .chart') &&
    !e.closest('[data-at]') && !e.querySelector('[data-at]') && !e.closest('label')?.querySelector('[data-at]'));
  return { wanted: wanted.map(words), mouseOnly: mouseOnly.map(words) };
}
"""
STEP = """
() => {
  const look = (e) => {
    const said = [];
    for (let at = e, up = 0; at && at !== document.body && up < 5; at = at.parentElement, up++)
      for (const part of [null, '::before', '::after']) {
        const s = getComputedStyle(at, part);
        said.push(s.outlineStyle, s.outlineWidth, s.boxShadow, s.borderColor, s.borderWidth, s.backgroundColor);
      }
    return said.join('|');
  };
  const now = document.activeElement, before = window.before;
  window.before = now;
  return [now.dataset.at ?? null, look(now), before?.dataset.at ?? null, before ? look(before) : ''];
}
"""
"""Returns the control that has the focus and how it looks, and how the one before looks now."""
STILL = """
() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync('* { transition: none !important; animation: none !important; }');
  document.adoptedStyleSheets = [sheet];
  document.activeElement?.blur();
}
"""


@pytest.fixture(scope="module")
def pages(console: RunningConsole) -> dict[str, tuple[str, str]]:
    """The pages that are tried: their addresses, and what is there once they are drawn."""
    run = log_run(console.platform, "by keyboard", steps=3)
    make_version(console.platform, "keys", auc=0.9, card="# Keys")
    console.platform.endpoints.deploy("keys-endpoint", model="keys@1")
    return {
        "overview": ("/w/default", ".layers .box-title"),
        "runs": ("/w/default/runs", ".data-table tbody tr"),
        "run": (f"/w/default/runs/{run}", "[data-part=points]"),
        "version": ("/w/default/models/keys/versions/1", "[role=heading]"),
        "endpoint": ("/w/default/endpoints/keys-endpoint", "[data-part=try]"),
        "policies": ("/w/default/governance/policies", "[role=heading]"),
    }


@pytest.fixture(scope="module")
def dark(console: RunningConsole) -> Iterator[BrowserContext]:
    context = console.signed_in(console.token(), dark=True)
    yield context
    context.close()


def require_reached(page: Page) -> None:
    """Press Tab until all is reached: every control must have the focus once, and look otherwise then."""
    page.evaluate(STILL)
    while True:
        found = page.evaluate(CONTROLS)
        focused, blurred = dict[int, str](), dict[int, str]()
        for _ in range(len(found["wanted"]) + 10):
            page.keyboard.press("Tab")
            at, look, before, look_before = page.evaluate(STEP)
            focused |= {} if at is None else {int(at): look}
            blurred |= {} if before in (None, at) else {int(before): look_before}
        wanted = found["wanted"]
        if page.locator("[data-at]").count() == len(wanted):  # else a part was drawn again meanwhile
            break
        page.evaluate(
            "document.querySelectorAll('[data-at]').forEach(e => { delete e.dataset.at; e.blur(); })"
        )
    assert {
        "not reached": [words for at, words in enumerate(wanted) if at not in focused],
        "mouse only": found["mouseOnly"],
        "focus not seen": [wanted[at] for at, look in focused.items() if blurred.get(at) == look],
    } == {"not reached": [], "mouse only": [], "focus not seen": []}
    assert len(focused) > 1


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["overview", "runs", "run", "version", "endpoint", "policies"])
def test_tab_reaches_every_control_and_the_focus_is_seen(
    owner: BrowserContext, dark: BrowserContext, pages: dict[str, tuple[str, str]], name: str, theme: str
) -> None:
    address, there = pages[name]
    page = (owner if theme == "light" else dark).new_page()
    page.goto(address)
    page.locator(there).first.wait_for()
    page.wait_for_function("window.did_handshake")

    require_reached(page)
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_tab_reaches_every_control_of_the_sign_in_page(console: RunningConsole, theme: str) -> None:
    context = console.browser.new_context(color_scheme=theme, base_url=console.url)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto("/signin")

    require_reached(page)
    context.close()


def test_enter_and_space_act_and_escape_closes_and_returns_the_focus(
    page: Page, pages: dict[str, tuple[str, str]]
) -> None:
    page.goto(pages["run"][0])
    button = page.locator("[data-action='runs.delete']")
    button.wait_for()
    page.wait_for_function("window.did_handshake")

    for key in ("Enter", "Space"):
        button.focus()
        page.keyboard.press(key)
        page.locator(".q-dialog").wait_for()
        page.wait_for_function("document.activeElement?.closest('.q-dialog')")
        page.keyboard.press("Escape")
        page.locator(".q-dialog").wait_for(state="detached")
        page.wait_for_function("document.activeElement?.dataset.action === 'runs.delete'")
    theme = page.get_by_label("Light or dark")
    theme.focus()
    page.keyboard.press("Enter")
    page.locator(".q-menu").wait_for()
    page.keyboard.press("Escape")
    page.locator(".q-menu").wait_for(state="detached")
    page.wait_for_function("document.activeElement?.getAttribute('aria-label') === 'Light or dark'")
    page.get_by_role("link", name="Jobs").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/jobs")


def test_a_part_that_is_drawn_again_keeps_the_focus(console: RunningConsole, page: Page) -> None:
    run = log_run(console.platform, "drawn again", steps=2)
    page.goto(f"/w/default/runs/{run}")
    page.locator("[data-action='runs.delete']").wait_for()
    page.wait_for_function("window.did_handshake")

    for tag in ("first", "second"):
        page.locator("[data-action='runs.delete']").focus()
        page.evaluate("window.focused = document.activeElement")
        console.platform.runs.set_tags(run, {tag: "set elsewhere"})
        page.get_by_label(f"Delete the tag {tag}").wait_for()
        page.wait_for_function(
            "!window.focused.isConnected && document.activeElement?.dataset.action === 'runs.delete'"
        )
    page.get_by_role("heading", level=1).click()  # nothing that takes the focus
    console.platform.runs.set_tags(run, {"third": "set elsewhere"})
    page.get_by_label("Delete the tag third").wait_for()
    assert page.evaluate("document.activeElement?.dataset.action ?? null") is None


def test_the_focus_does_not_go_to_what_comes_back_much_later(console: RunningConsole, page: Page) -> None:
    run = log_run(console.platform, "gone for good", steps=2)
    console.platform.runs.set_tags(run, {"kept": "yes", "gone": "soon"})
    page.goto(f"/w/default/runs/{run}")
    button = page.get_by_label("Delete the tag gone")
    button.wait_for()
    page.wait_for_function("window.did_handshake")

    button.focus()
    console.platform.runs.delete_tags(run, ["gone"])
    button.wait_for(state="detached")
    let_pass(2.5)  # it is waited for no longer
    for tag in ("other", "gone"):
        console.platform.runs.set_tags(run, {tag: "again"})
        page.get_by_label(f"Delete the tag {tag}").wait_for()

    assert page.evaluate("document.activeElement === document.body")


def test_the_search_opens_by_its_keys_and_is_driven_by_arrows(page: Page) -> None:
    page.goto("/w/default")
    page.locator(".layers").wait_for()
    page.wait_for_function("window.did_handshake")

    page.keyboard.press("Control+k")
    page.locator(".search-card .hit").first.wait_for()
    page.wait_for_function("document.activeElement?.tagName === 'INPUT'")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    second = page.locator(".search-card .hit").nth(1).get_attribute("href")
    assert page.evaluate("document.activeElement.getAttribute('href')") == second
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.tagName") == "INPUT"
    page.keyboard.press("Escape")
    page.locator(".search-card").wait_for(state="detached")

    page.keyboard.press("Control+k")
    page.locator(".search-card input").fill("queues")
    page.wait_for_function("document.querySelector('.search-card .hit')?.innerText.includes('Queues')")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/queues")
