"""Errors over HTTP: RFC 9457 problem details, and the HTTP status of each error."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from falaj import errors
from falaj.errors import FalajError

CONTENT_TYPE = "application/problem+json"

STATUS: dict[type[FalajError], int] = {
    errors.TooLarge: 413,
    errors.InvalidInput: 422,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.Unauthenticated: 401,
    errors.Denied: 403,
    errors.Damaged: 422,
    errors.KeyUnavailable: 409,
    errors.HomeBusy: 409,
    errors.Fenced: 409,
    errors.Interrupted: 409,
    errors.RateLimited: 429,
    errors.DeadlineExceeded: 504,
    errors.Unavailable: 503,
    errors.ProcessFailed: 503,
    errors.IsolationRefused: 409,
    errors.Internal: 500,
}
"""A subclass without an entry has the status of its nearest base class."""


def status_of(error: FalajError) -> int:
    """Return the HTTP status of `error`."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def problem_details(
    error: FalajError, *, request: str | None = None, status: int | None = None
) -> dict[str, Any]:
    """Return `error` as a problem document, from which the client rebuilds the error."""
    return {
        "type": f"urn:falaj:error:{error.code}",
        "title": type(error).__name__,
        "status": status or status_of(error),
        "detail": error.message,
        "code": error.code,
        "faults": [fault.model_dump(exclude_none=True) for fault in error.faults],
        "details": error.details,
        **({"instance": f"urn:falaj:request:{request}"} if request else {}),
    }


def error_response(error: FalajError, *, request: str | None = None, status: int | None = None) -> Response:
    """Return `error` as a response; `status` overrides that of the error."""
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, errors.Unauthenticated) else {}
    if isinstance(error, errors.Unavailable):
        headers["Retry-After"] = "1"
    found = problem_details(error, request=request, status=status)
    body = json.dumps(found, default=str)
    return Response(body, found["status"], headers=headers, media_type=CONTENT_TYPE)
