"""Errors as clients of MLflow read them: a code of MLflow's own, and a message that says the fix."""

from __future__ import annotations

import json

from starlette.responses import Response

from falaj import errors
from falaj.errors import FalajError, InvalidInput

CODES: dict[type[FalajError], tuple[str, int]] = {
    errors.InvalidInput: ("INVALID_PARAMETER_VALUE", 400),
    errors.NotFound: ("RESOURCE_DOES_NOT_EXIST", 404),
    errors.Conflict: ("INVALID_PARAMETER_VALUE", 400),
    errors.AlreadyExists: ("RESOURCE_ALREADY_EXISTS", 400),
    errors.Unauthenticated: ("UNAUTHENTICATED", 401),
    errors.Denied: ("PERMISSION_DENIED", 403),
    errors.Damaged: ("DATA_LOSS", 422),
    errors.Interrupted: ("CANCELLED", 409),
    errors.RateLimited: ("REQUEST_LIMIT_EXCEEDED", 429),
    errors.DeadlineExceeded: ("DEADLINE_EXCEEDED", 504),
    errors.Unavailable: ("TEMPORARILY_UNAVAILABLE", 503),
    errors.FalajError: ("INTERNAL_ERROR", 500),
}
"""A subclass without an entry has that of its nearest base class. Clients repeat what is 429 or 500 and above."""


OUT_OF_SCOPE = "out_of_scope"
"""The detail of an error for a request whose values ask for a part of MLflow that is out of scope."""


def out_of_scope(what: str) -> InvalidInput:
    """Return the error for such a request; the path alone does not tell."""
    return InvalidInput(_not_part(what), details={OUT_OF_SCOPE: True})


def mlflow_error(error: FalajError, *, request: str | None = None) -> Response:
    """Return `error` as a response of MLflow's."""
    if OUT_OF_SCOPE in error.details:
        return _response("NOT_IMPLEMENTED", error.message, 501)
    code, status = next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
    return _response(code, str(error), status)


def not_supported(what: str) -> Response:
    """Return the answer to a request for a part of MLflow that is out of scope."""
    return _response("NOT_IMPLEMENTED", _not_part(what), 501)


def _not_part(what: str) -> str:
    return f"{what} of MLflow is not part of Falaj's interface for it"


def refused(why: str) -> Response:
    """Return the answer to a request for what is never done here: why, and what to do instead."""
    return _response("INVALID_STATE", why, 400)


def unknown_route(method: str, path: str) -> Response:
    text = f"{method} {path} is not known here; this server speaks the 2.0 paths of MLflow's REST API"
    return _response("ENDPOINT_NOT_FOUND", text, 404)


def _response(code: str, message: str, status: int) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    body = json.dumps({"error_code": code, "message": message})
    return Response(body, status, headers=headers, media_type="application/json")
