"""Middleware that lets in requests of known hosts, of the console's own pages, and of people who are signed in."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from falaj.apps.api.errors import error_response
from falaj.apps.console.sessions import ConsoleSession, SessionStore
from falaj.apps.security_headers import HEADERS
from falaj.errors import Denied, InvalidInput, Unauthenticated

SESSION, NONCE = "falaj.session", "falaj.nonce"
"""Keys in the scope of a request."""
SOCKET = "/_nicegui_ws/"
FRAMEWORK = "/_nicegui/"
OPEN_PATHS = frozenset({"/session", "/healthz", "/assets/signin.js", "/assets/signin.css", "/favicon.ico"})
"""What needs no session: the sign-in page, and what it consists of."""
REFERRAL = "/signin"
"""The sign-in page; to a POST, which `falaj login` sends, it says where the API is, and does nothing else."""
DROPPED = frozenset({b"x-forwarded-prefix", b"x-forwarded-host", b"x-forwarded-proto", b"forwarded"})
"""Headers that the framework would write into pages; no proxy of ours sets them."""


def page_policy(nonce: str) -> str:
    """Return the content security policy of a page; decision 0065 says what the framework needs, and why."""
    return (
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "font-src 'self'; img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


class RequestGuard:
    """Checks host, origin and session of every request and websocket, before the framework sees it."""

    def __init__(
        self, app: ASGIApp, *, sessions: SessionStore, cookie: str, hosts: Collection[str] | None, scheme: str
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._cookie = cookie
        self._hosts = hosts
        self._scheme = scheme

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["headers"] = [each for each in scope["headers"] if each[0] not in DROPPED]
        refusal = self._refusal(scope, headers)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await refusal(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if self._hosts is not None and _name(host) not in self._hosts:
            return error_response(
                InvalidInput.at(
                    "Host",
                    given=host[:100],
                    allowed=", ".join(self._hosts),
                    fix="console.hosts in falaj.toml",
                ),
                status=421,
            )
        is_page = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        path = scope["path"]
        if path == REFERRAL and scope["type"] == "http":
            return None
        if not is_page and headers.get("origin") != f"{self._scheme}://{host}":
            return error_response(Denied("this request does not come from a page of the console"))
        if path.startswith(SOCKET) and scope["type"] == "http":
            return error_response(Denied("the console is connected by websocket only"))
        session = self._sessions.find(read_cookie(headers, self._cookie))
        if session is not None and session.address != client_address(scope):
            session = None  # where a person is decides what they may see: another place, another sign-in
        scope[SESSION] = session
        if path in OPEN_PATHS or session is not None:
            if session is not None and is_page and not path.startswith(FRAMEWORK):
                self._sessions.touch(session)
            return None
        if is_page and "text/html" in headers.get("accept", ""):
            query = scope["query_string"].decode("latin-1")
            wanted = path + (f"?{query}" if query else "")
            return RedirectResponse(f"/signin?next={quote(wanted)}" if wanted != "/" else "/signin", 303)
        return error_response(Unauthenticated("you are not signed in to the console"))


class PagePolicies:
    """Middleware that gives each page a nonce for its scripts, and a policy that allows no other inline ones."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[NONCE] = nonce = secrets.token_urlsafe(16)
        started: MutableMapping[str, Any] | None = None
        held = bytearray()

        async def send_with_nonce(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                if b"x-nicegui-content" not in names:
                    await send(message)
                    return
                started = message
            elif started is None:
                await send(message)
            else:
                held.extend(message.get("body", b""))
                if not message.get("more_body"):
                    await _send_page(send, started, bytes(held), nonce)

        await self._app(scope, receive, send_with_nonce)


async def _send_page(send: Send, started: MutableMapping[str, Any], body: bytes, nonce: str) -> None:
    """Send a page whose scripts have the nonce. Texts in it are escaped: `<script` is the framework's own."""
    body = body.replace(b"<script", f'<script nonce="{nonce}"'.encode())
    kept = [each for each in started["headers"] if each[0] != b"content-length"]
    added = [
        (b"content-length", str(len(body)).encode()),
        (b"content-security-policy", page_policy(nonce).encode()),
    ]
    await send({**started, "headers": [*kept, *added]})
    await send({"type": "http.response.body", "body": body})


def session_of(scope: Scope) -> ConsoleSession | None:
    """Return the session that the guard found for a request or websocket."""
    found: ConsoleSession | None = scope.get(SESSION)
    return found


def client_address(scope: Scope) -> str:
    """Return the address of the browser."""
    return scope["client"][0] if scope.get("client") else ""


def read_cookie(headers: Headers, name: str) -> str | None:
    """Return the value of one cookie."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return None
    return None if found is None else found.value


def console_headers() -> dict[str, str]:
    """Return the security headers of what is not a page: such answers run nothing."""
    return HEADERS | {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    }


def safe_next(given: str | None) -> str:
    """Return where to go after the sign-in: a path of the console, and nothing else."""
    path = given or "/"
    parts = urlsplit(path)
    is_own = (
        path.startswith("/") and not path.startswith(("//", "/\\")) and not parts.netloc and not parts.scheme
    )
    return path if is_own and path.isprintable() else "/"


def json_body(found: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(found), status, media_type="application/json")


def _name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.lower()
