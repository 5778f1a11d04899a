"""HTTP responses of the model server: cached heads, and errors in the format of the protocol."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from falaj import errors
from falaj.errors import FalajError

REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    406: "Not Acceptable",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    417: "Expectation Failed",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
}

STATUS: dict[type[FalajError], int] = {
    errors.TooLarge: 413,
    errors.InvalidInput: 400,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.Unauthenticated: 401,
    errors.Denied: 403,
    errors.RateLimited: 429,
    errors.DeadlineExceeded: 504,
    errors.Unavailable: 503,
    FalajError: 500,
}
"""A subclass has the status of its nearest base. Clients of the protocol expect 400 for invalid input."""

JSON, BYTES, METRICS = "application/json", "application/octet-stream", "text/plain; version=0.0.4"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_COMMON = "X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n"
_EXTRA = {401: "WWW-Authenticate: Bearer\r\n"}
_RETRIED = {429, 503}
_heads: dict[tuple[int, str], bytes] = {}


class HttpResponse(NamedTuple):
    """Status, body, size of its JSON part if binary tensors follow, prediction id, and the methods that are allowed.

    `retry_after` are the seconds after which a refused request may be sent again; 0: not said. `extra` are further
    header lines, each after a line break.
    """

    status: int
    body: bytes
    kind: str = JSON
    json_bytes: int | None = None
    prediction: str = ""
    allow: bytes = b""
    retry_after: int = 0
    extra: bytes = b""

    def to_bytes(self, *, closes: bool, without_body: bool = False) -> bytes:
        status, body, kind, json_bytes, prediction, allow, retry_after, extra = self
        head = _heads.get((status, kind)) or response_head(status, kind)
        end = b"\r\nConnection: close\r\n\r\n" if closes else b"\r\n\r\n"
        if json_bytes is not None:
            end = b"\r\nInference-Header-Content-Length: %d%b" % (json_bytes, end)
        if prediction:
            end = b"\r\nFalaj-Prediction: %b%b" % (prediction.encode(), end)
        if allow:
            end = b"\r\nAllow: %b%b" % (allow, end)
        if retry_after:
            end = b"\r\nRetry-After: %d%b" % (retry_after, end)
        if extra:
            end = extra + end
        return b"%b%d%b%b" % (head, len(body), end, b"" if without_body else body)


def response_head(status: int, kind: str) -> bytes:
    """Return the beginning of responses, up to their Content-Length."""
    start = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n"
    head = f"{start}{_COMMON}{_EXTRA.get(status, '')}Content-Length: ".encode()
    return _heads.setdefault((status, kind), head)


def json_response(content: object) -> HttpResponse:
    return HttpResponse(200, msgspec.json.encode(content))


def error_response(error: FalajError, *, status: int | None = None) -> HttpResponse:
    """Return `error` in the format of the protocol; `status` overrides the default of its type."""
    found = (
        status
        or error.details.get("http_status")
        or next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    )
    body = msgspec.json.encode({"error": error.message, "code": error.code})
    retry_after = int(error.details.get("retry_after_s", 1)) if found in _RETRIED else 0
    return HttpResponse(found, body, retry_after=retry_after)
