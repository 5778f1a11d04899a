"""Status codes of gRPC, and which of them an error has."""

from __future__ import annotations

from enum import IntEnum

from falaj import errors
from falaj.apps.model_server.http import responses
from falaj.errors import FalajError


class StatusCode(IntEnum):
    """The codes that the model server answers with."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


CODES: dict[type[FalajError], StatusCode] = {
    errors.TooLarge: StatusCode.RESOURCE_EXHAUSTED,
    errors.InvalidInput: StatusCode.INVALID_ARGUMENT,
    errors.NotFound: StatusCode.NOT_FOUND,
    errors.AlreadyExists: StatusCode.ALREADY_EXISTS,
    errors.Conflict: StatusCode.FAILED_PRECONDITION,
    errors.Unauthenticated: StatusCode.UNAUTHENTICATED,
    errors.Denied: StatusCode.PERMISSION_DENIED,
    errors.DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
    errors.RateLimited: StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: StatusCode.UNAVAILABLE,
    FalajError: StatusCode.INTERNAL,
}
"""A subclass has the code of its nearest base."""


def code_of(error: FalajError) -> StatusCode:
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def http_status_of(error: FalajError) -> int:
    """Return the status by which metrics count `error`, as over HTTP."""
    return next(responses.STATUS[kind] for kind in type(error).__mro__ if kind in responses.STATUS)
