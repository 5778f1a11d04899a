"""The address of a browser that uses the console, told to the API by a header that only the console can send."""

from __future__ import annotations

import hmac
import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

VARIABLE = "FALAJ_ORIGIN_KEY"
"""The parent gives the API and the console the same key, anew at each start."""
ORIGIN, KEY = "Falaj-Origin", "Falaj-Origin-Key"


def origin_headers(address: str, key: str) -> dict[str, str]:
    """Return the headers by which the console names the address of a browser."""
    return {ORIGIN: address, KEY: key}


class ForwardedOrigin:
    """Middleware that takes the address of a browser from the console, and from nobody else.

    Policies and residency depend on where a caller is: without this, everybody who uses the console would be on its
    machine.
    """

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = {name: value for name, value in scope["headers"] if name in _NAMES}
            if found:
                scope["headers"] = [each for each in scope["headers"] if each[0] not in _NAMES]
            if hmac.compare_digest(found.get(KEY.lower().encode(), b""), self._key):
                address = _address(found.get(ORIGIN.lower().encode(), b""))
                scope["client"] = (address, 0) if address else scope["client"]
        await self._app(scope, receive, send)


_NAMES = frozenset({ORIGIN.lower().encode(), KEY.lower().encode()})


def _address(given: bytes) -> str | None:
    try:
        return str(ipaddress.ip_address(given.decode("ascii")))
    except ValueError:
        return None
