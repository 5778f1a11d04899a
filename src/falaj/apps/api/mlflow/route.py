"""What a route of MLflow's is: the operation that it performs, its request, and how the result is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from falaj.errors import InvalidInput
from falaj.governance.operations.operation import Operation, ResponseShape
from falaj.records.record import Record

API = "/api/2.0/mlflow"
WORKSPACE_HEADER = "x-mlflow-workspace"
"""The header by which newer clients name a workspace (MLFLOW_WORKSPACE)."""
MODEL_KINDS = frozenset({"model", "model_version"})
"""Kinds that clients refer to by name; the others by id."""
PAGE_LIMIT = 1000


class NoAnswer(msgspec.Struct):
    """A request, or an answer, without fields."""


@dataclass(frozen=True)
class MlflowRoute:
    """One route. `given` returns the arguments of the operation, and `answer` the document that is sent back.

    `repeated` are the fields of a query that may be given several times; `context` adds fields from the request itself,
    and `headers` returns headers of the response.
    """

    method: str
    path: str
    operation: str
    request: type[msgspec.Struct]
    given: Callable[[Any], dict[str, Any]]
    answer: Callable[[Any, Any], Any] = lambda _request, _result: {}
    repeated: frozenset[str] = field(default_factory=frozenset)
    context: Callable[[Request], dict[str, str]] | None = None
    headers: Callable[[Any], dict[str, str]] = lambda _result: {}


class StreamBuilder(Protocol):
    """Builds the response of an operation whose result is a stream."""

    def build(self, operation: Operation, result: Any, *, caller: str) -> Response: ...


class MlflowDialect:
    """Reads the requests of one route, and writes its answers."""

    def __init__(self, route: MlflowRoute, streams: StreamBuilder) -> None:
        self.route = route
        self._streams = streams
        self._decoder = msgspec.json.Decoder(route.request, strict=False)

    def arguments(
        self, operation: Operation, request: Request, body: bytes | Iterator[bytes]
    ) -> tuple[BaseModel, Any]:
        """Return the typed input of the operation, and the request that it came from."""
        message = self._message(request, body)
        given = self.route.given(message)
        workspace = request.headers.get(WORKSPACE_HEADER)
        if workspace:
            given = _in_workspace(operation, given, workspace)
        if operation.upload is not None:
            given[operation.upload] = body
        return operation.check(given), message

    def response(self, operation: Operation, message: Any, result: Any, *, caller: str) -> Response:
        if operation.shape is not ResponseShape.RECORD:
            return self._streams.build(operation, result, caller=caller)
        content = msgspec.json.encode(self.route.answer(message, result))
        headers = self.route.headers(result)
        return Response(content, media_type="application/json", headers=headers)

    def _message(self, request: Request, body: bytes | Iterator[bytes]) -> Any:
        """Return the request: the JSON body, or the query, with what the path names."""
        try:
            added = request.path_params
            if self.route.context is not None:
                added = added | self.route.context(request)
            if isinstance(body, bytes) and body and not added:
                return self._decoder.decode(body)
            found: dict[str, Any] = {}
            if isinstance(body, bytes) and body:
                found = msgspec.json.decode(body, type=dict[str, Any])
            for name in request.query_params:
                values = request.query_params.getlist(name)
                found[name] = values if name in self.route.repeated else values[-1]
            return msgspec.convert(found | added, self.route.request, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput.at("body", given=str(error), allowed="a request of MLflow's API") from None


def _in_workspace(operation: Operation, given: dict[str, Any], workspace: str) -> dict[str, Any]:
    """Return the arguments of an operation with models named in the workspace that the client names."""
    placed = dict(given)
    if "workspace" in operation.parameters:
        placed["workspace"] = workspace
    for name in operation.references.keys() & given.keys():
        reference, kind = given[name], operation.references[name].kind
        named = kind in MODEL_KINDS or (kind is None and str(reference).startswith("model_version:"))
        if named and isinstance(reference, str) and "/" not in reference:
            placed[name] = f"{workspace}/{reference}"
    return placed


# -------------------------------------------------------------------------------------- values of both


def moment(milliseconds: int) -> datetime:
    """Return the moment so many milliseconds after 1970."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise InvalidInput.at(
            "timestamp", given=milliseconds, allowed="milliseconds since 1970, up to the year 9999"
        ) from None


def millis(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def number(value: float | str) -> float | str:
    """Return a measured value as JSON has it: MLflow spells NaN and infinities as words."""
    if isinstance(value, str) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class KeyValue(msgspec.Struct):
    """A parameter or a tag."""

    key: str
    value: str = ""


def pairs(given: Iterable[KeyValue], where: str) -> dict[str, str]:
    """Return parameters or tags by key; InvalidInput if a key has two values."""
    found: dict[str, str] = {}
    for each in given:
        if found.setdefault(each.key, each.value) != each.value:
            raise InvalidInput.at(f"{where}.{each.key}", given="two values", allowed="one value for each key")
    return found


class Keyed(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def value(self) -> str: ...


def key_values(found: Iterable[Keyed]) -> list[dict[str, str]]:
    return [{"key": each.key, "value": each.value} for each in found]


def of_mapping(found: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in found.items()]


def page_size(given: int | None, default: int = PAGE_LIMIT) -> int:
    """Return how many items a page has; clients ask for up to 50,000, and read on by the token."""
    if given is None:
        return default
    if given < 1:
        raise InvalidInput.at("max_results", given=given, allowed="1 and more")
    return min(given, PAGE_LIMIT)


VIEWS = {"ACTIVE_ONLY": "active", "DELETED_ONLY": "deleted", "ALL": "all", "": "active"}


def view(given: str | int | None) -> str:
    name = {1: "ACTIVE_ONLY", 2: "DELETED_ONLY", 3: "ALL"}.get(given) if isinstance(given, int) else given
    if (found := VIEWS.get(name or "")) is None:
        raise InvalidInput.at("view_type", given=given, allowed="ACTIVE_ONLY, DELETED_ONLY or ALL")
    return found


def next_page(found: Any) -> dict[str, str]:
    return {"next_page_token": found.next} if found.next else {}


def lifecycle(found: Record) -> str:
    return "active" if getattr(found, "deleted_at", None) is None else "deleted"
