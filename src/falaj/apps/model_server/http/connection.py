"""One connection: HTTP/1.1 parsed by httptools, answered in order, limited in bytes and time."""

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

BODIED = frozenset((b"content-length", b"transfer-encoding"))
HEADERS = BODIED | {
    *(b"authorization", b"content-encoding", b"expect", b"falaj-caller", b"inference-header-content-length"),
}
OPEN = frozenset((b"/v2/health/live", b"/v2/health/ready"))
"""The only paths that answer without a token."""

_log = logging.getLogger(__name__)


class ServerContext(Protocol):
    """What a connection needs of its server."""

    limits: ServerLimits
    metrics: ServerMetrics
    connections: set[Connection]
    now: float
    """Monotonic seconds, as of the last sweep: near enough for deadlines, and free."""
    stopping: bool

    def dispatch(self, exchange: HttpExchange) -> None: ...


class RequestRejected(Exception):
    """Ends the parsing of a connection whose last answer is decided."""


class Connection(asyncio.Protocol):
    """Reads requests, hands them to the server, and writes the answers in the order of the requests."""

    def __init__(self, context: ServerContext, *, internal: bool = False) -> None:
        """`inside`: at the other end is a process of the platform, which has admitted the caller that it names."""
        self._context = context
        self._internal = internal
        self._limits = context.limits
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[HttpExchange] = deque()
        self._current: HttpExchange | None = None
        self._again = b""
        self._in_head = False
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._raw_bytes = 0
        self._refused = False
        self._lingers = False
        self._blocked = False
        self._held_back = False
        self._ended = False
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
        """The client has said all it will; what it asked is answered still."""
        self._ended = True
        if self._current is not None:
            self._context.metrics.held_bytes -= self._queue.pop().size
            self._current = None
        return bool(self._queue) and self._transport.get_extra_info("sslcontext") is None

    def pause_writing(self) -> None:
        self._blocked = True
        self.deadline = self._context.now + self._limits.body_s
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._blocked = False
        self.deadline = self._context.now + self._limits.idle_s
        if not self._held_back:
            self._transport.resume_reading()

    def expire(self) -> None:
        """The deadline has passed."""
        if self._lingers or self._blocked or self._refused:
            self._transport.abort()
        elif self._held_back:  # it is we who are slow
            self.deadline = self._context.now + self._limits.body_s
        elif self._in_head or self._current is not None:
            self._refuse(InvalidInput("the request took too long to arrive"), status=408)
        elif not self._queue:
            self._transport.close()

    def retire(self) -> None:
        """The server stops: close now if nothing is asked, else after the last answer."""
        if not self._queue and not self._in_head:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # --------------------------------------------------------------------------------------- the parser

    def _feed(self, data: bytes) -> bytes:
        """Parse `data`; what is left of it if the parser stopped halfway."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # we speak nothing else, so go on with HTTP/1.1
            self._parser = httptools.HttpRequestParser(self)
            again, self._again = self._again, b""
            return again + data[upgrade.args[0] :]
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
            _log.error("a request could not be handled", exc_info=cause)
            self._refuse(Internal("a fault of ours; the details are in the server's log"))
        else:
            self._refuse(InvalidInput(f"this is not a request that Falaj can read: {error}"))

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
        if name in HEADERS:
            if name in self._headers:
                raise self._stop(InvalidInput(f"the header {name.decode()} is given twice"))
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser, headers = self._parser, self._headers
        if parser.should_upgrade() and BODIED & headers.keys():
            self._again = _without_upgrade(parser.get_method(), self._url, headers)
            return
        keeps = parser.should_keep_alive() and parser.get_http_version() != "1.0"
        exchange = HttpExchange(self, parser.get_method(), self._url, headers, closes=not keeps)
        self.deadline = self._context.now + self._limits.body_s
        announced = headers.get(b"content-length")
        if announced is not None and int(announced) > self._limits.body_bytes:
            raise self._stop(_too_large(self._limits.body_bytes))
        if self._internal:
            exchange.caller = headers.get(b"falaj-caller", b"").decode("latin-1")
        elif exchange.credential is None and self._url not in OPEN:
            raise self._stop(Unauthenticated("no token was presented; send 'Authorization: Bearer …'"))
        if b"content-encoding" in headers:
            raise self._stop(InvalidInput("compressed bodies are not served; send it as it is"), status=415)
        self._current = exchange
        self._queue.append(exchange)
        if b"expect" in headers:
            exchange.wants_continue = True
            self._invite()

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
            raise self._stop(Unavailable("the server holds all the bytes that it may; try again later"))

    def on_message_complete(self) -> None:
        exchange, self._current = self._current, None
        if exchange is None:
            return
        if not self._blocked:
            self.deadline = self._context.now + self._limits.idle_s
        exchange.wants_continue = False
        self._context.dispatch(exchange)
        if len(self._queue) >= self._limits.pipelined and not self._held_back:
            self._held_back = True
            self._transport.pause_reading()

    # -------------------------------------------------------------------------------------- the answers

    def flush(self) -> None:
        """Write the answers at the front of the queue that are there."""
        queue, context = self._queue, self._context
        while queue and queue[0].response is not None:
            exchange = queue.popleft()
            context.metrics.held_bytes -= exchange.size
            last = not queue and self._current is None and (context.stopping or self._ended)
            closes = exchange.closes or last
            self._transport.write(exchange.to_bytes(closes=closes))
            if closes:
                self._linger()
                return
        if self._held_back and len(queue) < self._limits.pipelined:
            self._held_back = False
            if not self._blocked:
                self._transport.resume_reading()
        self._invite()

    def _invite(self) -> None:
        """Tell a client that waits for it to send the body, once all earlier answers are out."""
        if self._queue and self._queue[0].wants_continue:
            self._queue[0].wants_continue = False
            self._transport.write(responses.CONTINUE)

    def _linger(self) -> None:
        """Say that nothing more comes, and give the client time to read before the connection is cut."""
        self._refused = self._lingers = True
        self.deadline = self._context.now + self._limits.linger_s
        for exchange in self._queue:
            self._context.metrics.held_bytes -= exchange.size
            exchange.cancel()
        self._queue.clear()
        self._current = None
        if self._ended or not self._transport.can_write_eof():
            self._transport.close()
        else:
            self._transport.write_eof()

    def _stop(self, error: FalajError, *, status: int | None = None) -> RequestRejected:
        self._refuse(error, status=status)
        return RequestRejected()

    def _refuse(self, error: FalajError, *, status: int | None = None) -> None:
        """Answer what is being received with `error`, after all earlier answers, and then close."""
        self._refused = True
        if self._current is None:
            self._queue.append(HttpExchange(self, b"", b"", {}, closes=True))
        exchange, self._current = self._queue[-1], None
        exchange.closes = True
        response: HttpResponse = responses.error_response(error, status=status)
        self._context.metrics.refused[response.status] += 1
        exchange.finish(response)


def _without_upgrade(method: bytes, url: bytes, headers: Mapping[bytes, bytes]) -> bytes:
    """The head of a request whose body the parser would skip, because it offers to upgrade (as Java's client does)."""
    lines = [b"%b: %b\r\n" % header for header in headers.items()]
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, url, b"".join(lines))


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than the {limit} bytes that this server takes")


def _head_too_large(limit: int) -> InvalidInput:
    return InvalidInput(f"the head of the request is larger than {limit} bytes")
