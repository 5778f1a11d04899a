"""Security headers for browsers, on every response."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

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

    def __init__(self, app: ASGIApp, *, tls: bool, headers: Mapping[str, str] = HEADERS) -> None:
        self._app = app
        headers = {**headers} | ({"Strict-Transport-Security": "max-age=31536000"} if tls else {})
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                added = [header for header in self._headers if header[0] not in given]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
