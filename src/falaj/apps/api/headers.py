"""Headers that a request may have once only."""

from __future__ import annotations

from collections import Counter

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from falaj.apps.api.authentication import INTERFACE, origin_of
from falaj.apps.api.errors import error_response
from falaj.errors import InvalidInput
from falaj.governance.identity.failures import FailedAuthentications

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
