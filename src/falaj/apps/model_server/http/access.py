"""What an operator opens to clients without a token, and to scripts of other sites (CORS)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from falaj.apps.model_server.http.responses import HttpResponse
from falaj.records.config import ServingConfig

READY = b"/ready"
MODEL_PATHS = b"/v2/models/"

ALLOWED_HEADERS = (
    *(b"Authorization", b"Content-Type", b"Content-Encoding", b"Inference-Header-Content-Length"),
    *(b"Falaj-Key", b"Falaj-Logged", b"Falaj-Version"),
)
EXPOSED_HEADERS = (b"Inference-Header-Content-Length", b"Falaj-Prediction", b"Falaj-Logged", b"Retry-After")
PREFLIGHT_S = 600
"""How long a browser may remember what a site may send."""


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """Readiness of models without a token, and the origins whose scripts may read responses."""

    public_readiness: bool = False
    origins: frozenset[bytes] = frozenset()

    def is_public(self, method: bytes, path: bytes) -> bool:
        """Return whether a request needs no token: it asks whether a model is ready, and the operator allows that."""
        return (
            self.public_readiness
            and method in (b"GET", b"HEAD")
            and path.startswith(MODEL_PATHS)
            and path.endswith(READY)
        )

    def is_preflight(self, method: bytes, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a browser asks what a site may send, and may be told."""
        return method == b"OPTIONS" and bool(self._allowed_origin(headers))

    def header_lines(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the header lines of the response to a script of another site; never with cookies."""
        origin = self._allowed_origin(headers)
        if not origin:
            return b""
        exposed = b", ".join(EXPOSED_HEADERS)
        lines = b"\r\nAccess-Control-Allow-Origin: %b\r\nAccess-Control-Expose-Headers: %b" % (
            origin,
            exposed,
        )
        return lines if origin == b"*" else lines + b"\r\nVary: Origin"

    def _allowed_origin(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the origin as the response names it; empty if its scripts may not read it."""
        origin = headers.get(b"origin", b"")
        if not origin or not self.origins:
            return b""
        if b"*" in self.origins:
            return b"*"
        return origin if origin in self.origins else b""


def preflight_response() -> HttpResponse:
    """Return the answer to a browser that asks what a site may send; `header_lines` tell that it may."""
    extra = b"\r\nAccess-Control-Allow-Methods: GET, HEAD, POST\r\nAccess-Control-Allow-Headers: %b" % (
        b", ".join(ALLOWED_HEADERS)
    )
    return HttpResponse(200, b"", extra=extra + b"\r\nAccess-Control-Max-Age: %d" % PREFLIGHT_S)


def access_of(config: ServingConfig) -> HttpAccess:
    return HttpAccess(config.public_readiness, frozenset(origin.encode() for origin in config.cors.origins))
