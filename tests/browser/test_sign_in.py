"""Signing in and out of the console in a browser."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest

from consoles import RunningConsole, started_console
from falaj.sdk import credentials
from polling import PATIENCE_S, eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def test_a_sign_in_link_opens_the_console_once(console: RunningConsole, browser: Browser) -> None:
    code = console.platform.tokens.sign_in_link().code
    first, second = browser.new_context(), browser.new_context()
    page = first.new_page()

    page.goto(f"{console.url}/#code={code}")

    page.wait_for_selector(".layers")
    assert "code" not in page.url
    assert page.evaluate("document.cookie").find("falaj_console") == -1  # scripts do not see it
    again = second.new_page()
    again.goto(f"{console.url}/#code={code}")
    again.get_by_text("sign-in").first.wait_for()
    assert urlsplit(again.url).path == "/signin"
    first.close()
    second.close()


def test_who_is_not_signed_in_gets_to_the_page_after_the_sign_in(
    console: RunningConsole, browser: Browser
) -> None:
    context = browser.new_context()
    page = context.new_page()

    page.goto(f"{console.url}/w/default?filter=x")
    page.fill("#token", console.token())
    page.keyboard.press("Enter")

    page.wait_for_selector(".layers")
    assert page.url == f"{console.url}/w/default?filter=x"
    context.close()


def test_a_revoked_token_ends_its_open_pages(console: RunningConsole, browser: Browser) -> None:
    issued = console.platform.tokens.issue(purpose="to be revoked")
    context = console.signed_in(issued.secret)
    page = context.new_page()
    page.goto("/w/default")
    page.wait_for_selector(".layers")

    console.platform.tokens.revoke(issued.token.id)

    page.wait_for_url("**/signin**")
    page.goto("/w/default")
    assert urlsplit(page.url).path == "/signin"
    context.close()


def test_a_session_is_ended_from_another_browser_and_the_back_button_shows_nothing_of_it(
    console: RunningConsole, browser: Browser
) -> None:
    token = console.person("ends-a-session", "viewer")
    there, here = console.signed_in(token), console.signed_in(token)
    open_page, page = there.new_page(), here.new_page()
    open_page.goto("/w/default/runs?filter=x")
    open_page.goto("/w/default")
    open_page.wait_for_selector(".layers")
    page.goto("/w/default")
    page.wait_for_selector(".layers")

    page.get_by_label("You").click()
    page.get_by_text("Sessions").click()
    page.locator(".session-row").get_by_role("button", name="End").click()

    open_page.wait_for_url("**/signin?next=%2Fw%2Fdefault")
    open_page.go_back()
    open_page.wait_for_url("**/signin**")
    assert open_page.locator(".layers").count() == 0
    page.reload()
    page.wait_for_selector(".layers")
    there.close()
    here.close()


def test_signing_out_revokes_the_token_of_a_link(console: RunningConsole, browser: Browser) -> None:
    code = console.platform.tokens.sign_in_link().code
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{console.url}/#code={code}")
    page.wait_for_selector(".layers")
    links = [each for each in console.platform.tokens.list(limit=1000).items if _is_live_link(each)]
    token = max(links, key=lambda each: each.created_at)

    page.get_by_label("You").click()
    page.get_by_text("Sign out").click()

    page.wait_for_url("**/signin")

    def is_over() -> bool:
        (found,) = [each for each in console.platform.tokens.list(limit=1000).items if each.id == token.id]
        return found.revoked_at is not None or found.expires_at < token.expires_at

    eventually(is_over)
    context.close()


def test_the_command_line_takes_a_link_of_the_console_as_well(console: RunningConsole) -> None:
    code = console.platform.tokens.sign_in_link().code

    url, name = credentials.sign_in(console.url, code)

    assert (url, name) == (console.api, console.platform.users.whoami().principal.name)


@pytest.mark.slow
def test_a_console_that_dies_comes_back_and_the_rest_goes_on(tmp_path: Path, browser: Browser) -> None:
    with started_console(tmp_path, browser) as own:  # sessions end with their console
        pid = own.child("falaj.apps.console.process")
        os.kill(pid, signal.SIGKILL)

        assert own.platform.users.whoami()
        eventually(lambda: own.child("falaj.apps.console.process") not in (None, pid))
        assert httpx.get(f"{own.url}/healthz", timeout=PATIENCE_S).json() == {
            "alive": True
        }  # it waits in the socket
        own.signed_in(own.token()).close()


def test_no_request_leaves_the_host(console: RunningConsole, page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(urlsplit(request.url).netloc))
    page.on("websocket", lambda socket: asked.append(urlsplit(socket.url).netloc))

    page.goto("/w/default")
    page.wait_for_selector(".layers")

    assert {*asked} == {urlsplit(console.url).netloc}


def _is_live_link(token: object) -> bool:
    return getattr(token, "purpose", "") == "signed in by link" and getattr(token, "revoked_at", None) is None
