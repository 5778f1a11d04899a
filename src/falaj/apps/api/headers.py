"""Headers: those that a request may have once only, and security headers on every response."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from falaj.apps.api.authentication import INTERFACE, origin_of
from falaj.apps.api.errors import error_response
from falaj.errors import InvalidInput
from falaj.governance.identity.failures import FailedAuthentications

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


class SecurityHeaders:
    """Middleware that adds the security headers for browsers."""

    def __init__(self, app: ASGIApp, *, tls: bool) -> None:
        self._app = app
        headers = HEADERS | ({"Strict-Transport-Security": "max-age=31536000"} if tls else {})
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                added = [header for header in self._headers if header[0] not in given]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


ONCE = frozenset(
    name.encode()
    for name in (
        *("authorization", "content-length", "content-type", "host", "idempotency-key"),
        *("transfer-encoding", "x-request-id"),
    )
)


class SingleHeaders:
    """Middleware that refuses a request with two headers where one counts: another program may read the other."""

    def __init__(self, app: ASGIApp, *, failures: FailedAuthentications) -> None:
        self._app = app
        self._failures = failures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            names = [name for name, _ in scope["headers"] if name in ONCE]
            if len(names) != len(set(names)):
                twice = [name.decode() for name, count in Counter(names).items() if count > 1]
                if "authorization" in twice:
                    origin = origin_of(HTTPConnection(scope))
                    self._failures.add("two_tokens", origin, interface=INTERFACE)
                app = error_response(
                    InvalidInput.at(twice[0], given="more than one", allowed="one"), status=400
                )
        await app(scope, receive, send)
