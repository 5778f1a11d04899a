"""Reads an operation's typed input from an HTTP request."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextvars import Context, copy_context
from typing import Any

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from falaj.apps.byte_shares import ByteShares
from falaj.errors import Interrupted, InvalidInput, TooLarge, Unavailable
from falaj.governance.operations.operation import Operation
from falaj.records.names import new_id

RATE_WINDOW_S = 30.0
MIN_BYTES_PER_S = 4096
"""The lowest rate of an upload over this time of waiting for it; time in which its bytes are handled does not count."""

BODY_S = 60.0
"""How long any other body may take in total."""

KEY = re.compile(r"[\x21-\x7e]{1,200}")
REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,100}")


class HeldBody:
    """The bytes of a body that are in memory, counted for a caller until they are released."""

    def __init__(self, shares: ByteShares, holder: str) -> None:
        self._shares = shares
        self._holder = holder
        self._size = 0

    def add(self, size: int) -> None:
        if not self._shares.take(self._holder, size):
            raise Unavailable(
                "your requests hold as much of the server's memory as it has left; try again later"
            )
        self._size += size

    def release(self) -> None:
        self._shares.release(self._holder, self._size)
        self._size = 0


async def read_body(request: Request, *, limit: int, held: HeldBody, within_s: float | None = None) -> bytes:
    """Return the whole body; raise TooLarge as soon as it exceeds `limit`."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(declared, limit)
    body = bytearray()
    try:
        async with asyncio.timeout(within_s or BODY_S):
            async for chunk in request.stream():
                held.add(len(chunk))
                body += chunk
                if len(body) > limit:
                    raise _too_large(f"more than {limit}", limit)
    except (ClientDisconnect, TimeoutError):
        raise Interrupted("the request was interrupted; nothing was done, send it again") from None
    return bytes(body)


def typed_input(operation: Operation, request: Request, body: bytes | Iterator[bytes]) -> BaseModel:
    """Return the operation's input, from the query of a GET or an upload, else from the JSON body."""
    if operation.upload is not None:
        query = query_values(operation, request)
        return operation.check(query | {operation.upload: body})
    if request.method in ("GET", "HEAD"):
        return operation.check(query_values(operation, request))
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if body and kind != "application/json":
        raise InvalidInput.at("Content-Type", given=kind, allowed="application/json")
    return operation.check_json(body if isinstance(body, bytes) else b"".join(body))


def query_values(operation: Operation, request: Request) -> dict[str, Any]:
    """Return the query as values; only a parameter that takes several may be repeated."""
    values: dict[str, Any] = {}
    for name in request.query_params:
        given = request.query_params.getlist(name)
        if name not in operation.repeated and len(given) > 1:
            raise InvalidInput.at(f"query {name}", given=f"{len(given)} times", allowed="once")
        if name == operation.upload:
            raise InvalidInput.at(f"query {name}", given=given[0], allowed="the body of the request")
        values[name] = tuple(given) if name in operation.repeated else given[0]
    return values


def body_stream(request: Request) -> Iterator[bytes]:
    """Return the body as chunks, for an operation that runs in worker threads.

    They are read in the context of the request, not of the operation: reading resumes the connection, and later
    requests on it would otherwise run in the context, and with the caller, of this operation.
    """
    stream, context, loop = request.stream(), copy_context(), asyncio.get_running_loop()
    return _pulled(stream, context, loop)


def _pulled(
    stream: AsyncIterator[bytes], context: Context, loop: asyncio.AbstractEventLoop
) -> Iterator[bytes]:

    async def next_chunk() -> bytes | None:
        async with asyncio.timeout(RATE_WINDOW_S):
            return await anext(stream, None)

    waited_s, received = 0.0, 0
    while True:
        began = time.monotonic()
        try:
            chunk = context.run(asyncio.run_coroutine_threadsafe, next_chunk(), loop).result()
        except (ClientDisconnect, TimeoutError):
            raise Interrupted("the upload was interrupted; nothing was stored, send it again") from None
        if chunk is None:
            return
        waited_s, received = waited_s + time.monotonic() - began, received + len(chunk)
        if waited_s >= RATE_WINDOW_S:
            if received < MIN_BYTES_PER_S * waited_s:
                raise Interrupted(
                    f"the upload sent {received} bytes in {waited_s:.0f} s; nothing was stored, send it again with at "
                    f"least {MIN_BYTES_PER_S} bytes a second"
                )
            waited_s, received = 0.0, 0
        yield chunk


def idempotency_key(request: Request) -> str | None:
    """Return the idempotency key of the request, if it has one."""
    key = request.headers.get("idempotency-key")
    if key is not None and not KEY.fullmatch(key):
        raise InvalidInput.at("Idempotency-Key", given=key, allowed="1 to 200 printable ASCII characters")
    return key


def request_id(request: Request) -> str:
    """Return the caller's own request id if it is valid, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else new_id("req")


def _too_large(given: object, limit: int) -> TooLarge:
    return TooLarge.at(
        "body", given=f"{given} bytes", allowed=f"at most {limit} bytes", fix="use blobs.upload"
    )
