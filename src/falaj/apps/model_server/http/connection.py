"""An HTTP/1.1 connection: parsed by httptools, answered in order, limited in bytes and time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Protocol, cast

import httptools

from falaj.apps.model_server.http import responses
from falaj.apps.model_server.http.exchange import HttpExchange
from falaj.apps.model_server.http.responses import HttpResponse
from falaj.apps.model_server.limits import ServerLimits
from falaj.apps.model_server.metrics import ServerMetrics
from falaj.errors import FalajError, Internal, InvalidInput, TooLarge, Unauthenticated, Unavailable

BODY_HEADERS = frozenset((b"content-length", b"transfer-encoding"))
KEPT_HEADERS = BODY_HEADERS | {
    *(b"authorization", b"content-encoding", b"expect", b"falaj-caller", b"inference-header-content-length"),
}
UNAUTHENTICATED_PATHS = frozenset((b"/v2/health/live", b"/v2/health/ready"))
"""The only paths that need no token."""

_log = logging.getLogger(__name__)


class ServerContext(Protocol):
    """The server as its connections see it."""

    limits: ServerLimits
    metrics: ServerMetrics
    connections: set[Connection]
    now: float
    """Monotonic seconds as of the last sweep: precise enough for deadlines, and free."""
    stopping: bool

    def dispatch(self, exchange: HttpExchange) -> None: ...


class RequestRejected(Exception):
    """Stops the parser after a request was rejected."""


class Connection(asyncio.Protocol):
    """Reads requests, dispatches them, and writes the responses in the order of the requests."""

    def __init__(self, context: ServerContext, *, internal: bool = False) -> None:
        """`internal`: the peer is a process of the platform that has admitted the caller that it names."""
        self._context = context
        self._internal = internal
        self._limits = context.limits
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[HttpExchange] = deque()
        self._current: HttpExchange | None = None
        self._replayed_head = b""
        self._in_head = False
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._raw_bytes = 0
        self._refused = False
        self._lingers = False
        self._write_paused = False
        self._read_paused = False
        self._eof = False
        self.deadline = context.now + self._limits.head_s

    # ------------------------------------------------------------------------------------ the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._context.connections.add(self)
        self._context.metrics.connections += 1
        if len(self._context.connections) > self._limits.connections:
            self._refuse(Unavailable("too many connections; try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._context.connections.discard(self)
        self._context.metrics.connections -= 1
        for exchange in self._queue:
            self._context.metrics.held_bytes -= exchange.size
            exchange.cancel()
        self._queue.clear()
        self._current = None

    def data_received(self, data: bytes) -> None:
        while data and not self._refused:
            data = self._feed(data)

    def eof_received(self) -> bool:
        """The client has finished sending; its pending requests are still answered."""
        self._eof = True
        if self._current is not None:
            self._context.metrics.held_bytes -= self._queue.pop().size
            self._current = None
        return bool(self._queue) and self._transport.get_extra_info("sslcontext") is None

    def pause_writing(self) -> None:
        self._write_paused = True
        self.deadline = self._context.now + self._limits.body_s
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self.deadline = self._context.now + self._limits.idle_s
        if not self._read_paused:
            self._transport.resume_reading()

    def expire(self) -> None:
        """Handle a passed deadline."""
        if self._lingers or self._write_paused or self._refused:
            self._transport.abort()
        elif self._read_paused:  # the server is slow, not the client
            self.deadline = self._context.now + self._limits.body_s
        elif self._in_head or self._current is not None:
            self._refuse(InvalidInput("the request did not arrive in time"), status=408)
        elif not self._queue:
            self._transport.close()

    def close_when_idle(self) -> None:
        """Close now if no request is pending, else after the last response."""
        if not self._queue and not self._in_head:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # --------------------------------------------------------------------------------------- the parser

    def _feed(self, data: bytes) -> bytes:
        """Parse `data`; return the rest of it if the parser stopped early."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # no upgrade is supported: continue with HTTP/1.1
            self._parser = httptools.HttpRequestParser(self)
            head, self._replayed_head = self._replayed_head, b""
            return head + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self._parsing_failed(error)
            return b""
        if self._in_head or self._current is not None:
            self._raw_bytes += len(data)
            limit = self._limits.head_bytes
            if self._in_head and self._raw_bytes > limit + len(data):
                self._refuse(_head_too_large(limit), status=431)
            elif self._raw_bytes > limit + self._limits.body_bytes * 9 // 8 + len(data):
                self._refuse(_too_large(self._limits.body_bytes))
        return b""

    def _parsing_failed(self, error: Exception) -> None:
        cause = error.__context__
        if self._refused:
            return
        if isinstance(error, httptools.HttpParserCallbackError) and cause is not None:
            _log.error("request handling failed", exc_info=cause)
            self._refuse(Internal("internal error; see the log of the server"))
        else:
            self._refuse(InvalidInput(f"malformed HTTP request: {error}"))

    def on_message_begin(self) -> None:
        self._in_head = True
        self._url = b""
        self._headers = {}
        self._head_bytes = self._raw_bytes = 0
        self.deadline = self._context.now + self._limits.head_s

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.head_bytes:
            raise self._stop(_head_too_large(self._limits.head_bytes), status=431)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._limits.head_bytes:
            raise self._stop(_head_too_large(self._limits.head_bytes), status=431)
        name = name.lower()
        if name in KEPT_HEADERS:
            if name in self._headers:
                raise self._stop(InvalidInput(f"the header {name.decode()} is given twice"))
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser, headers = self._parser, self._headers
        if parser.should_upgrade() and BODY_HEADERS & headers.keys():
            self._replayed_head = _without_upgrade(parser.get_method(), self._url, headers)
            return
        keeps = parser.should_keep_alive() and parser.get_http_version() != "1.0"
        exchange = HttpExchange(self, parser.get_method(), self._url, headers, closes=not keeps)
        self.deadline = self._context.now + self._limits.body_s
        announced = headers.get(b"content-length")
        if announced is not None and int(announced) > self._limits.body_bytes:
            raise self._stop(_too_large(self._limits.body_bytes))
        if self._internal:
            exchange.caller = headers.get(b"falaj-caller", b"").decode("latin-1")
        elif exchange.credential is None and self._url not in UNAUTHENTICATED_PATHS:
            raise self._stop(Unauthenticated("no token was presented; send 'Authorization: Bearer …'"))
        if b"content-encoding" in headers:
            raise self._stop(
                InvalidInput("compressed bodies are not supported; send the body uncompressed"), status=415
            )
        self._current = exchange
        self._queue.append(exchange)
        if b"expect" in headers:
            exchange.wants_continue = True
            self._send_continue()

    def on_body(self, body: bytes) -> None:
        exchange = self._current
        if exchange is None:
            return
        exchange.add(body)
        metrics = self._context.metrics
        metrics.held_bytes += len(body)
        if exchange.size > self._limits.body_bytes:
            raise self._stop(_too_large(self._limits.body_bytes))
        if metrics.held_bytes > self._limits.held_bytes:
            raise self._stop(
                Unavailable("the server has reached its memory limit for requests; try again later")
            )

    def on_message_complete(self) -> None:
        exchange, self._current = self._current, None
        if exchange is None:
            return
        if not self._write_paused:
            self.deadline = self._context.now + self._limits.idle_s
        exchange.wants_continue = False
        self._context.dispatch(exchange)
        if len(self._queue) >= self._limits.pipelined and not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()

    # ------------------------------------------------------------------------------------- the responses

    def flush(self) -> None:
        """Write the finished responses at the front of the queue."""
        queue, context = self._queue, self._context
        while queue and queue[0].response is not None:
            exchange = queue.popleft()
            context.metrics.held_bytes -= exchange.size
            last = not queue and self._current is None and (context.stopping or self._eof)
            closes = exchange.closes or last
            self._transport.write(exchange.to_bytes(closes=closes))
            if closes:
                self._linger()
                return
        if self._read_paused and len(queue) < self._limits.pipelined:
            self._read_paused = False
            if not self._write_paused:
                self._transport.resume_reading()
        self._send_continue()

    def _send_continue(self) -> None:
        """Send 100 Continue to a client that expects it, after all earlier responses."""
        if self._queue and self._queue[0].wants_continue:
            self._queue[0].wants_continue = False
            self._transport.write(responses.CONTINUE)

    def _linger(self) -> None:
        """Close the write side, and give the client time to read before the connection is closed."""
        self._refused = self._lingers = True
        self.deadline = self._context.now + self._limits.linger_s
        for exchange in self._queue:
            self._context.metrics.held_bytes -= exchange.size
            exchange.cancel()
        self._queue.clear()
        self._current = None
        if self._eof or not self._transport.can_write_eof():
            self._transport.close()
        else:
            self._transport.write_eof()

    def _stop(self, error: FalajError, *, status: int | None = None) -> RequestRejected:
        self._refuse(error, status=status)
        return RequestRejected()

    def _refuse(self, error: FalajError, *, status: int | None = None) -> None:
        """Reject the current request with `error` after all earlier responses, and close the connection."""
        self._refused = True
        if self._current is None:
            self._queue.append(HttpExchange(self, b"", b"", {}, closes=True))
        exchange, self._current = self._queue[-1], None
        exchange.closes = True
        response: HttpResponse = responses.error_response(error, status=status)
        self._context.metrics.refused[response.status] += 1
        exchange.finish(response)


def _without_upgrade(method: bytes, url: bytes, headers: Mapping[bytes, bytes]) -> bytes:
    """Rebuild a head without its upgrade offer (as Java's client sends), which makes the parser skip the body."""
    lines = [b"%b: %b\r\n" % header for header in headers.items()]
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, url, b"".join(lines))


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body exceeds the limit of {limit} bytes")


def _head_too_large(limit: int) -> InvalidInput:
    return InvalidInput(f"the request head exceeds the limit of {limit} bytes")
