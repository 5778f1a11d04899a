"""`fj.connect`: the services of a remote platform over REST, with the same signatures, records and errors."""

from __future__ import annotations

import json
import os
import ssl
import uuid
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from falaj.control.services import Services, service_types
from falaj.errors import (
    FalajError,
    Internal,
    Interrupted,
    InvalidInput,
    Unauthenticated,
    Unavailable,
    rebuild,
)
from falaj.governance.operations.caller import current_terms
from falaj.governance.operations.operation import Operation, ResponseShape
from falaj.records.governance.identity import IssuedToken
from falaj.sdk.credentials import token_for
from falaj.sdk.platform import Platform

T = TypeVar("T")

TRIES = 3
TIMEOUT = httpx.Timeout(60, connect=5)
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=3)
"""Idle connections are closed before the server does it, after five seconds."""


def connect(
    url: str,
    token: str | None = None,
    *,
    verify: ssl.SSLContext | None = None,
    headers: Mapping[str, str] | None = None,
) -> Platform:
    """Connect to the platform at `url`. The default token is FALAJ_TOKEN or the saved one; FALAJ_CA names a CA file.

    `verify` is how to verify its certificate, instead; `headers` are sent with every request.
    """
    client = _client(url, token or token_for(url), verify, headers)
    gate = RemoteGate(client)
    services = Services(**{name: remote_service(kind, gate) for name, kind in service_types().items()})
    return Platform(services, where=url, on_close=client.close)


def redeem(url: str, code: str) -> str:
    """Redeem a sign-in code; return the token."""
    return redeem_token(url, code).secret


def redeem_token(
    url: str,
    code: str,
    *,
    verify: ssl.SSLContext | None = None,
    headers: Mapping[str, str] | None = None,
) -> IssuedToken:
    """Redeem a sign-in code; return the token with its id."""
    with _client(url, None, verify, headers) as client:
        response = _send(client, client.build_request("POST", "/signin", json={"code": code}))
        _raise_problem(response)
        return IssuedToken.model_validate_json(response.content)


def remote_service(service: type, gate: RemoteGate) -> Any:
    """Return a service of class `service` whose operations are performed by `gate`."""
    made: Any = object.__new__(service)
    made.gate = gate
    return made


class RemoteGate:
    """Performs operations over HTTP. A write has an idempotency key, so that it can be retried."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def perform(self, operation: Operation, service: Any, given: BaseModel) -> Any:
        if operation.shape is ResponseShape.RECORD:
            response = self._ask(operation, given)
            return operation.output.validate_json(response.content)
        return STREAMS[operation.shape](self, operation, given)

    def reject(self, operation: Operation, error: FalajError) -> None:
        """Input that is wrong never leaves this side."""

    def open_stream(self, operation: Operation, given: BaseModel) -> httpx.Response:
        """The answer's beginning; the error, if it is one."""
        request = self._request(operation, given)
        response = _send(self._client, request, stream=True)
        if response.is_error:
            response.read()
            _raise_problem(response)
        return response

    def _ask(self, operation: Operation, given: BaseModel) -> httpx.Response:
        request = self._request(operation, given)
        tries = 1 if operation.upload else TRIES
        for attempt in range(1, tries + 1):
            try:
                response = _send(self._client, request)
            except Unavailable:
                if attempt == tries:
                    raise
                continue
            _raise_problem(response)
            return response
        raise Unavailable(f"{self._client.base_url} does not answer")

    def _request(self, operation: Operation, given: BaseModel) -> httpx.Request:
        terms = current_terms()
        headers = {} if operation.mode.reads else {"Idempotency-Key": terms.key or uuid.uuid4().hex}
        if terms.request:
            headers["X-Request-ID"] = terms.request
        if operation.upload is None:
            headers["Content-Type"] = "application/json"
            return self._client.build_request(
                "POST", operation.path, content=given.model_dump_json(), headers=headers
            )
        query = given.model_dump(mode="json", exclude={operation.upload}, exclude_defaults=True)
        data = getattr(given, operation.upload)
        headers["Content-Type"] = "application/octet-stream"
        return self._client.build_request("POST", operation.path, params=query, content=data, headers=headers)


def _records(gate: RemoteGate, operation: Operation, given: BaseModel) -> Iterator[Any]:
    response = gate.open_stream(operation, given)

    def records() -> Iterator[Any]:
        with _unbroken(response):
            for line in _lines(response):
                if line.startswith(b'{"problem":'):
                    raise _error(json.loads(line)["problem"])
                yield operation.output.validate_json(line)

    return _closing(response, records())


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Yield lines that end with a newline; a record may contain the other characters that end lines elsewhere."""
    held = b""
    for piece in response.iter_raw():
        *whole, held = (held + piece).split(b"\n")
        yield from whole


def _bytes(gate: RemoteGate, operation: Operation, given: BaseModel) -> Iterator[bytes]:
    """Yield bytes; an interrupted read resumes at its offset."""
    response = gate.open_stream(operation, given)

    def pieces(response: httpx.Response, given: BaseModel, tries: int) -> Iterator[bytes]:
        received = 0
        try:
            with _unbroken(response):
                for piece in response.iter_raw():
                    received += len(piece)
                    yield piece
        except Interrupted:
            if tries == 1 or "offset" not in operation.parameters:
                raise
            rest = _after(given, received)
            yield from pieces(gate.open_stream(operation, rest), rest, tries - 1)

    return _closing(response, pieces(response, given, TRIES))


def _closing(response: httpx.Response, stream: Iterator[T]) -> Iterator[T]:
    """Return `stream`; its connection is closed even if it is never read."""
    weakref.finalize(stream, response.close)
    return stream


def _after(given: BaseModel, received: int) -> BaseModel:
    """Return the same read, without what was received."""
    length = getattr(given, "length", None)
    moved = {"offset": getattr(given, "offset", 0) + received}
    return given.model_copy(update=moved | ({} if length is None else {"length": length - received}))


def _arrow(gate: RemoteGate, operation: Operation, given: BaseModel) -> Any:
    import pyarrow as pa

    response = gate.open_stream(operation, given)
    return pa.ipc.open_stream(pa.PythonFile(_Reader(response), "r"))


STREAMS: dict[ResponseShape, Any] = {
    ResponseShape.RECORDS: _records,
    ResponseShape.BYTES: _bytes,
    ResponseShape.ARROW: _arrow,
}


class _Reader:
    """A response as a readable file."""

    closed = False

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._pieces = response.iter_raw()
        self._held = b""

    def read(self, size: int = -1) -> bytes:
        with _unbroken(self._response, close=False):
            while size < 0 or len(self._held) < size:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._held += piece
        taken, self._held = (self._held, b"") if size < 0 else (self._held[:size], self._held[size:])
        return taken

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True
        self._response.close()


class _unbroken:  # noqa: N801 - used as a with-statement
    """Turns a broken stream into Interrupted, and closes it."""

    def __init__(self, response: httpx.Response, *, close: bool = True) -> None:
        self._response = response
        self._close = close

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._close:
            self._response.close()
        if isinstance(error, httpx.HTTPError):
            raise Interrupted(f"the stream was interrupted: {error}; continue from its cursor") from error


def _client(
    url: str,
    token: str | None,
    trust: ssl.SSLContext | None = None,
    further: Mapping[str, str] | None = None,
) -> httpx.Client:
    token = token and token.strip()
    if token and not (token.isascii() and token.isprintable()):
        raise Unauthenticated("the token has characters that no token has; was it cut or changed?")
    headers = {**(further or {}), **({"Authorization": f"Bearer {token}"} if token else {})}
    verify: Any = trust or os.environ.get("FALAJ_CA") or True
    if isinstance(verify, str):
        verify = ssl.create_default_context(cafile=verify)
    try:
        return httpx.Client(
            base_url=url, headers=headers, timeout=TIMEOUT, limits=LIMITS, verify=verify, trust_env=False
        )
    except httpx.InvalidURL as error:
        raise InvalidInput.at(
            "url", given=url, allowed=f"an address like http://host:port ({error})"
        ) from None


def _send(client: httpx.Client, request: httpx.Request, *, stream: bool = False) -> httpx.Response:
    try:
        return client.send(request, stream=stream)
    except httpx.HTTPError as error:
        raise Unavailable(
            f"{client.base_url} does not answer: {error or type(error).__name__}; does 'falaj status' say that it runs?"
        ) from error


def _raise_problem(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        found = response.json()
    except ValueError:
        found = {}
    raise _error(found if isinstance(found, dict) and "code" in found else _foreign(response))


def _foreign(response: httpx.Response) -> dict[str, Any]:
    return {
        "code": Internal.code,
        "detail": f"{response.url} answered {response.status_code}, not as a Falaj does",
    }


def _error(found: dict[str, Any]) -> FalajError:
    return rebuild(found["code"], found["detail"], found.get("faults", []), found.get("details", {}))
