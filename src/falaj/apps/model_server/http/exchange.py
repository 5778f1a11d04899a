"""An HTTP exchange: a request and its response, passed between connection and dispatcher."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

from falaj.apps.model_server.http.compression import MIN_COMPRESSED_BYTES, accepted_coding
from falaj.apps.model_server.http.repeated_heads import RepeatedHead
from falaj.apps.model_server.http.responses import HttpResponse, error_response
from falaj.apps.model_server.tracing.spans import RequestTrace
from falaj.errors import InvalidInput, Unavailable
from falaj.serving.runtime.batch_queue import QueuedRequest

MAX_TOKEN_BYTES = 8192
LARGE_RESPONSE_BYTES = 64 * 1024
"""Larger responses count among the held bytes until the client has read them."""


class ResponseQueue(Protocol):
    """Writes responses in the order of the requests."""

    def flush(self) -> None: ...
    def header_lines(self, headers: Mapping[bytes, bytes]) -> bytes: ...
    def compress(self, exchange: HttpExchange, response: HttpResponse, coding: bytes) -> None: ...
    def holds(self, exchange: HttpExchange, size: int) -> bool: ...


class InferenceExchange(Protocol):
    """A request for inference as its prediction sees it, whatever protocol it came by."""

    began: float
    size: int
    queued: QueuedRequest | None
    trace: RequestTrace | None

    @property
    def cancelled(self) -> bool: ...
    def header(self, name: bytes) -> bytes | None: ...
    def finish(self, response: HttpResponse) -> None: ...


class HttpExchange:
    """A complete request, and its response once there is one."""

    __slots__ = (
        *("_chunks", "_headers", "_writer", "response", "began", "caller", "closes", "credential"),
        *("cancelled", "holder", "is_authenticated", "method", "path", "size", "wants_continue", "queued"),
        *("repeated", "trace"),
    )

    def __init__(
        self,
        writer: ResponseQueue,
        method: bytes,
        path: bytes,
        headers: Mapping[bytes, bytes],
        *,
        closes: bool,
    ) -> None:
        self._writer = writer
        self._headers = headers
        self._chunks: list[bytes | memoryview] = []
        self.method = method
        self.path = path
        self.credential = _bearer(headers.get(b"authorization"))
        self.caller: str | None = None
        """The caller named by another platform process, on the internal socket."""
        self.holder = ""
        """Whose share of held bytes the request counts for: its caller, or the address until the token is checked."""
        self.is_authenticated = True
        """Whether the token was checked, or none is needed; such a request is dispatched once it is complete."""
        self.closes = closes
        self.size = 0
        self.wants_continue = False
        self.began = time.perf_counter()
        self.response: HttpResponse | None = None
        self.queued: QueuedRequest | None = None
        self.trace: RequestTrace | None = None
        self.repeated: RepeatedHead | None = None
        """The head that other requests of the connection have too."""
        self.cancelled = False

    def add(self, body: bytes) -> None:
        self._chunks.append(body)
        self.size += len(body)

    def replace_body(self, body: memoryview) -> None:
        """Set the whole body, whose size is counted already."""
        self._chunks = [body]

    @property
    def body(self) -> bytes:
        whole = self.buffer
        return whole if isinstance(whole, bytes) else bytes(whole)

    @property
    def buffer(self) -> bytes | memoryview:
        """Return the body where it lies; a large one is not copied."""
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0] if self._chunks else b""

    def header(self, name: bytes) -> bytes | None:
        """Return the value of one of the KEPT_HEADERS of a connection, if it was given."""
        return self._headers.get(name)

    @property
    def json_bytes(self) -> int | None:
        """Return the size of the JSON part of the body, if binary tensors follow it."""
        value = self._headers.get(b"inference-header-content-length")
        if value is None:
            return None
        if not value.isdigit() or len(value) > 18:
            raise InvalidInput("Inference-Header-Content-Length must be a number of bytes")
        return int(value)

    @property
    def coding(self) -> bytes:
        """Return the coding of the body; empty if it is not compressed."""
        coding = self._headers.get(b"content-encoding", b"").strip().lower()
        return b"" if coding == b"identity" else coding

    def hold(self, body: bytes) -> None:
        """Replace a compressed body by what it contains. Raise Unavailable if the caller may not hold as much."""
        if not self._writer.holds(self, len(body)):
            raise Unavailable(f"there is no memory for a body of {len(body)} bytes; try again later")
        self._chunks = [body]

    def finish(self, response: HttpResponse) -> None:
        """Set the response; it is written after all earlier ones."""
        if len(response.body) >= MIN_COMPRESSED_BYTES and not self.cancelled:
            coding = accepted_coding(self._headers.get(b"accept-encoding", b""))
            if coding and self.method != b"HEAD":
                self._writer.compress(self, response, coding)
                return
        self.send(response)

    def send(self, response: HttpResponse) -> None:
        """Set the response as it is."""
        if self.trace is not None:
            self.trace.end(response.status)
        if not self.cancelled:
            if len(response.body) > LARGE_RESPONSE_BYTES and not self._writer.holds(self, len(response.body)):
                response = error_response(_response_not_held(len(response.body)))
            self.response = response
            self.queued = (
                None  # it refers to this exchange: the two would stay until the garbage collector runs
            )
            self._writer.flush()

    def cancel(self) -> None:
        """Mark the exchange as cancelled: the client no longer waits."""
        self.cancelled = True
        if self.queued is not None:
            self.queued.cancelled = True
            self.queued = None

    def to_bytes(self, *, closes: bool) -> bytes:
        if self.response is None:
            return b""
        response = self.response
        if b"origin" in self._headers:
            response = response._replace(extra=response.extra + self._writer.header_lines(self._headers))
        return response.to_bytes(closes=closes, without_body=self.method == b"HEAD")


def _response_not_held(size: int) -> Unavailable:
    return Unavailable(f"there is no memory for a response of {size} bytes; read the earlier ones first")


@lru_cache(maxsize=1024)
def _bearer(value: bytes | None) -> str | None:
    """Return the bearer token of an Authorization header, if any."""
    if value is None or len(value) > MAX_TOKEN_BYTES or value[:7].lower() != b"bearer ":
        return None
    return value[7:].strip().decode("latin-1") or None
