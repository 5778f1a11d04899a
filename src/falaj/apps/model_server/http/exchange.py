"""A request and its answer, as they pass between the connection and the endpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

from falaj.apps.model_server.http.responses import HttpResponse
from falaj.errors import InvalidInput
from falaj.serving.runtime.batch_queue import QueuedRequest


class ResponseQueue(Protocol):
    """Where answers are written, in order."""

    def flush(self) -> None: ...


class HttpExchange:
    """A request, complete when its server gets it, and the answer once there is one."""

    __slots__ = (
        *("_chunks", "_headers", "_line", "response", "began", "caller", "closes", "credential"),
        *("gone", "method", "path", "size", "wants_continue", "queued"),
    )

    def __init__(
        self, line: ResponseQueue, method: bytes, path: bytes, headers: Mapping[bytes, bytes], *, closes: bool
    ) -> None:
        self._line = line
        self._headers = headers
        self._chunks: list[bytes] = []
        self.method = method
        self.path = path
        self.credential = _bearer(headers.get(b"authorization"))
        self.caller: str | None = None
        """Who asks, where that was decided before: at the inner door."""
        self.closes = closes
        self.size = 0
        self.wants_continue = False
        self.began = time.perf_counter()
        self.response: HttpResponse | None = None
        self.queued: QueuedRequest | None = None
        self.gone = False

    def add(self, body: bytes) -> None:
        self._chunks.append(body)
        self.size += len(body)

    @property
    def body(self) -> bytes:
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0] if self._chunks else b""

    @property
    def json_bytes(self) -> int | None:
        """How many bytes of the body are JSON, if binary tensors follow it."""
        value = self._headers.get(b"inference-header-content-length")
        if value is None:
            return None
        if not value.isdigit() or len(value) > 18:
            raise InvalidInput("Inference-Header-Content-Length is a number of bytes")
        return int(value)

    def finish(self, response: HttpResponse) -> None:
        """The answer is known; it is written when all earlier ones are."""
        if not self.gone:
            self.response = response
            self._line.flush()

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self.gone = True
        if self.queued is not None:
            self.queued.cancelled = True

    def to_bytes(self, *, closes: bool) -> bytes:
        if self.response is None:
            return b""
        return self.response.to_bytes(closes=closes, without_body=self.method == b"HEAD")


@lru_cache(maxsize=1024)
def _bearer(value: bytes | None) -> str | None:
    """The token of an Authorization header, if it has one."""
    if value is None or value[:7].lower() != b"bearer ":
        return None
    return value[7:].strip().decode("latin-1") or None
