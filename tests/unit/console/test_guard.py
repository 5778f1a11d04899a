"""The guard of the console: hosts, origins, sessions, and the policy of pages."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from falaj.apps.console.guard import PagePolicies, RequestGuard, console_headers, safe_next, session_of
from falaj.apps.console.sessions import ConsoleSession, SessionStore
from falaj.apps.security_headers import SecurityHeaders
from falaj.records.governance.identity import Identity, Principal

COOKIE = "falaj_console_7482"
OWN = "http://127.0.0.1:7482"
HOSTS = ("localhost", "127.0.0.1", "[::1]", "ml.example.org")


class ClosedPlatform:
    """A platform that can only be closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def identity(name: str = "dana") -> Identity:
    person = Principal(id=f"user_{name}", name=name, kind="user", created_at=datetime.now(UTC))
    return Identity(principal=person, grants=())


def opened(
    sessions: SessionStore, name: str = "dana", address: str = "testclient"
) -> tuple[str, ConsoleSession]:
    platform: Any = ClosedPlatform()
    return sessions.open(platform, identity(name), zone="Asia/Dubai", address=address, browser="", token=None)


async def who(request: Request) -> Response:
    session = session_of(request.scope)
    return PlainTextResponse(session.person if session else "nobody")


async def drawn(_request: Request) -> Response:
    body = "<script>one()</script><script type='module'>two('&lt;script&gt;')</script>"
    return HTMLResponse(body, headers={"X-NiceGUI-Content": "page"})


async def forwarded(request: Request) -> Response:
    return PlainTextResponse(str("x-forwarded-prefix" in request.headers))


async def echo(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("open")
    await socket.close()


@pytest.fixture
def sessions() -> SessionStore:
    return SessionStore(lasts=timedelta(hours=12), idle=timedelta(hours=2))


@pytest.fixture
def client(sessions: SessionStore) -> Iterator[TestClient]:
    routes = [
        Route("/w/default", who),
        Route("/page", drawn),
        Route("/forwarded", forwarded),
        Route("/session", who, methods=["POST"]),
        Route("/signin", who),
        WebSocketRoute("/_nicegui_ws/socket.io/", echo),
    ]
    guard = RequestGuard(
        PagePolicies(Starlette(routes=routes)), sessions=sessions, cookie=COOKIE, hosts=HOSTS, scheme="http"
    )
    app = SecurityHeaders(guard, tls=False, headers=console_headers())
    with TestClient(app, base_url=OWN, follow_redirects=False) as made:
        yield made


def test_a_page_without_a_session_leads_to_the_sign_in_and_back(client: TestClient) -> None:
    answer = client.get("/w/default?filter=a%20b", headers={"Accept": "text/html"})

    assert answer.status_code == 303
    assert answer.headers["location"] == "/signin?next=/w/default%3Ffilter%3Da%2520b"


def test_what_is_no_page_is_refused_without_a_session(client: TestClient) -> None:
    assert client.get("/w/default").status_code == 401
    assert client.get("/_nicegui/3.18.0/static/nicegui.js").status_code == 401
    assert client.get("/signin").status_code == 200


def test_a_cookie_is_a_session_until_it_ends(client: TestClient, sessions: SessionStore) -> None:
    cookie, session = opened(sessions)
    client.cookies.set(COOKIE, cookie)

    assert client.get("/w/default").text == "dana"
    sessions.end(session)

    assert client.get("/w/default").status_code == 401


def test_a_cookie_is_good_at_the_address_where_the_person_signed_in(
    client: TestClient, sessions: SessionStore
) -> None:
    client.cookies.set(COOKIE, opened(sessions, address="10.0.0.1")[0])

    assert client.get("/w/default").status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil:7482"])
def test_other_hosts_are_refused(client: TestClient, sessions: SessionStore, host: str) -> None:
    client.cookies.set(COOKIE, opened(sessions)[0])

    assert client.get("/w/default", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:9000", "ML.example.org", "[::1]:7482"])
def test_known_hosts_are_answered_on_any_port(client: TestClient, host: str) -> None:
    assert client.get("/signin", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", [None, "null", "http://evil.example", "https://127.0.0.1:7482", "http://127.0.0.1:80"]
)
def test_a_post_of_another_site_is_refused(client: TestClient, origin: str | None) -> None:
    headers = {} if origin is None else {"Origin": origin}

    assert client.post("/session", headers=headers).status_code == 403
    assert client.post("/session", headers={"Origin": OWN}).status_code == 200


@pytest.mark.parametrize(("origin", "with_cookie"), [(OWN, False), ("http://evil.example", True), ("", True)])
def test_a_websocket_needs_a_session_and_the_own_origin(
    client: TestClient, sessions: SessionStore, origin: str, with_cookie: bool
) -> None:
    if with_cookie:
        client.cookies.set(COOKIE, opened(sessions)[0])

    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect(
            f"ws://127.0.0.1:7482{'/_nicegui_ws/socket.io/'}", headers={"Origin": origin}
        ),
    ):
        pass


def test_a_websocket_of_an_own_page_is_accepted(client: TestClient, sessions: SessionStore) -> None:
    client.cookies.set(COOKIE, opened(sessions)[0])

    with client.websocket_connect(
        "ws://127.0.0.1:7482/_nicegui_ws/socket.io/", headers={"Origin": OWN}
    ) as socket:
        assert socket.receive_text() == "open"


def test_the_socket_is_no_long_polling(client: TestClient, sessions: SessionStore) -> None:
    client.cookies.set(COOKIE, opened(sessions)[0])

    assert client.get("/_nicegui_ws/socket.io/?transport=polling").status_code == 403


def test_pages_have_a_policy_with_a_nonce_for_their_own_scripts(
    client: TestClient, sessions: SessionStore
) -> None:
    client.cookies.set(COOKIE, opened(sessions)[0])

    first, second = client.get("/page"), client.get("/page")

    policy = first.headers["content-security-policy"]
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert len(nonce) >= 20
    assert policy != second.headers["content-security-policy"]
    assert first.text.count(f'<script nonce="{nonce}"') == first.text.count("<script")
    script = policy.partition("script-src")[2].partition(";")[0]
    assert "unsafe-inline" not in script
    assert "http" not in policy
    assert "frame-ancestors 'none'" in policy
    assert int(first.headers["content-length"]) == len(first.content)


def test_answers_have_the_security_headers_and_are_not_kept(client: TestClient) -> None:
    answer = client.get("/signin")

    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_headers_of_proxies_do_not_reach_the_framework(client: TestClient, sessions: SessionStore) -> None:
    client.cookies.set(COOKIE, opened(sessions)[0])

    assert client.get("/forwarded", headers={"X-Forwarded-Prefix": "/evil"}).text == "False"


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "//evil.example",
        "/\\evil.example",
        "https://evil.example",
        "javascript:alert(1)",
        "/a\nb",
        "a",
    ],
)
def test_the_sign_in_leads_to_pages_of_the_console_only(given: str | None) -> None:
    assert safe_next(given) == "/"
    assert safe_next("/w/default/runs?filter=a%20b") == "/w/default/runs?filter=a%20b"
