"""An HTTP/1.1 connection: parsed by httptools, answered in order, limited in bytes and time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from functools import partial
from hmac import compare_digest
from typing import cast

import httptools

from falaj.apps.model_server.connections import (
    ServerContext,
    address_of,
    count_for_caller,
    spare_connection,
    stop_counting,
    too_much_held,
)
from falaj.apps.model_server.http import responses
from falaj.apps.model_server.http.compression import CODINGS
from falaj.apps.model_server.http.exchange import LARGE_RESPONSE_BYTES, HttpExchange
from falaj.apps.model_server.http.large_bodies import RECEIVED_APART_BYTES, LargeBody
from falaj.apps.model_server.http.repeated_heads import MAX_DIGITS, RepeatedHead, RepeatedRequest, kept_head
from falaj.apps.model_server.http.responses import HttpResponse
from falaj.errors import FalajError, Internal, InvalidInput, TooLarge, Unauthenticated, Unavailable

BODY_HEADERS = frozenset((b"content-length", b"transfer-encoding"))
KEPT_HEADERS = BODY_HEADERS | {
    *(b"authorization", b"content-encoding", b"expect", b"falaj-caller", b"inference-header-content-length"),
    *(b"falaj-secret", b"host", b"origin"),
    *(b"falaj-version", b"falaj-key", b"traceparent"),
}
"""Headers with a meaning here; each may be given once."""
CODED_HEADERS = frozenset((b"content-encoding", b"transfer-encoding"))
"""Headers of a body whose bytes are not those of the request."""
LISTED_HEADERS = frozenset((b"accept", b"accept-encoding", b"content-type"))
"""Headers that are lists, so that they may be given several times."""
UNAUTHENTICATED_PATHS = frozenset((b"/v2/health/live", b"/v2/health/ready"))
"""The only paths that need no token; they take no body."""

CONTINUES, CHUNKED = b"100-continue", b"chunked"

HEADER_COST = 32
"""Bytes of a head that a header counts beside its own, so that a head cannot consist of very many."""


_log = logging.getLogger(__name__)


class RequestRejected(Exception):
    """Stops the parser after a request was rejected."""


class Connection(asyncio.Protocol):
    """Reads requests, dispatches them, and writes the responses in the order of the requests."""

    def __init__(self, context: ServerContext, *, internal: bytes = b"") -> None:
        """`internal`: the secret by which a process of the platform, which has admitted its caller, is known."""
        self._context = context
        self._internal = internal
        self._limits = context.limits
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[HttpExchange | RepeatedRequest] = deque()
        self._current: HttpExchange | None = None
        self._replayed_head = b""
        self._repeated: RepeatedHead | None = None
        """The head of the last request, if the next one may be known by it."""
        self._whole = b""
        """What was received, from the beginning of a request."""
        self._in_head = False
        self._url = self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._raw_bytes = 0
        self._refused = False
        self._lingers = False
        self._write_paused = False
        self._read_paused = False
        self._unauthenticated = 0
        """Requests whose token is being checked; nothing is read meanwhile."""
        self._unread: list[tuple[str, int]] = []
        """Large responses, by holder and size, that the client has not read yet."""
        self._source = ""
        self._is_stranger = not internal
        """No valid token was presented yet."""
        self._caller = ""
        self._eof = False
        self._leaves = False
        """The connection is closed after the next response."""
        self.deadline = context.now + self._limits.head_s

    # ------------------------------------------------------------------------------------ the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        context = self._context
        self._source = address_of(transport)
        context.connections.add(self)
        context.metrics.connections += 1
        if len(context.connections) > self._limits.connections:
            spare = spare_connection(context)
            if spare is None:
                self._refuse(Unavailable("too many connections; try again later"))
            else:
                spare.abort()
        if self._is_stranger:
            context.strangers[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        context = self._context
        stop_counting(context, self, self._caller)
        self._release_unread()
        for exchange in self._queue:
            context.shares.release(exchange.holder, exchange.size)
            exchange.cancel()
        self._queue.clear()
        self._current = None

    def data_received(self, data: bytes) -> None:
        self._whole = b""
        if not (self._in_head or self._refused or self._unauthenticated) and self._current is None:
            head = self._repeated
            if head is not None and (body := head.body_of(data)) is not None:
                if head.kept is not None and not self._queue:
                    request = head.kept.repeat(self, head, body)
                    if request is not None:
                        self._queue.append(request)
                        self.deadline = self._context.now + self._limits.idle_s
                        return
                if self._repeat(head, body):
                    return
            self._whole = data
        while data and not self._refused:
            data = self._feed(data)

    def _repeat(self, head: RepeatedHead, body: bytes) -> bool:
        """Dispatch a request with a head that was accepted before; false if the parser is to see it."""
        context, caller, size = self._context, self._caller, len(body)
        if (
            size > self._limits.body_bytes
            or context.recognize(head.credential) != caller
            or not context.shares.take(caller, size)
        ):
            return False
        exchange = HttpExchange(self, head.method, head.path, head.headers, closes=False)
        exchange.holder = caller
        exchange.repeated = head
        exchange.add(body)
        self._queue.append(exchange)
        self._complete(exchange)
        return True

    def eof_received(self) -> bool:
        """The client has finished sending; its pending requests are still answered."""
        self._eof = True
        if self._current is not None:
            self._queue.remove(self._current)
            self._context.shares.release(self._current.holder, self._current.size)
            self._current.cancel()
            self._current = None
        return bool(self._queue) and self._transport.get_extra_info("sslcontext") is None

    def pause_writing(self) -> None:
        self._write_paused = True
        self.deadline = self._context.now + self._limits.body_s
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._release_unread()
        self.deadline = self._context.now + self._limits.idle_s
        self._resume_reading()

    def _resume_reading(self) -> None:
        if not (self._read_paused or self._write_paused or self._unauthenticated):
            self._transport.resume_reading()

    def _release_unread(self) -> None:
        for holder, size in self._unread:
            self._context.shares.release(holder, size)
        self._unread.clear()

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

    def close_after_response(self) -> None:
        """Close after the next response, now or later: an idle client is not surprised by the end."""
        self._leaves = True

    def abort(self) -> None:
        """Close at once. The connection no longer counts, though the transport reports its loss only later."""
        stop_counting(self._context, self, self._caller)
        self._transport.abort()

    @property
    def pending(self) -> int:
        """The number of requests that are not answered yet."""
        return len(self._queue)

    @property
    def waits_for_client(self) -> bool:
        """Whether no complete request is pending: the connection is idle, or the client is sending."""
        return not self._queue or (len(self._queue) == 1 and self._queue[0] is self._current)

    # --------------------------------------------------------------------------------------- the parser

    def _feed(self, data: bytes) -> bytes:
        """Parse `data`; return the rest of it if the parser stopped early."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # no upgrade is supported: continue with HTTP/1.1
            self._parser = httptools.HttpRequestParser(self)
            self._whole = b""
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
            else:
                self._receive_large_body()
        return b""

    def _receive_large_body(self) -> None:
        """Receive the rest of a large body of binary tensors without the parser, which would copy it."""
        exchange, headers = self._current, self._headers
        if exchange is None or not exchange.is_authenticated or CODED_HEADERS & headers.keys():
            return
        size = int(headers.get(b"content-length", 0))
        json_bytes = headers.get(b"inference-header-content-length", b"")
        if json_bytes.isdigit() and size - exchange.size >= RECEIVED_APART_BYTES:
            self._parser = httptools.HttpRequestParser(self)
            tensors_at = int(json_bytes[:MAX_DIGITS])
            self._set_protocol(LargeBody(self, exchange.body, size, tensors_at=tensors_at))

    def body_arrived(self, size: int) -> bool:
        if self._current is not None and self._context.shares.take(self._current.holder, size):
            self._current.size += size
            return True
        self._set_protocol(self)
        if self._current is not None:
            self._refuse(too_much_held())
        return False

    def body_complete(self, body: memoryview) -> None:
        self._set_protocol(self)
        if self._current is not None:
            self._current.replace_body(body)
        self.on_message_complete()

    def _set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let another protocol receive what comes; reading begins anew, as the loop has chosen how when it began."""
        is_reading = self._transport.is_reading()
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        if is_reading:
            self._transport.resume_reading()

    def _parsing_failed(self, error: Exception) -> None:
        cause = error.__context__
        if self._refused:
            return
        if isinstance(error, httptools.HttpParserCallbackError) and cause is not None:
            _log.error("request handling failed", exc_info=cause)
            self._refuse(Internal("internal error; see the log of the server"))
        else:
            status = 505 if "version" in str(error).lower() or self._url == b"*" else None
            self._refuse(InvalidInput(f"malformed HTTP request: {error}"), status=status)

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
        self._head_bytes += len(name) + len(value) + HEADER_COST
        if self._head_bytes > self._limits.head_bytes:
            raise self._stop(_head_too_large(self._limits.head_bytes), status=431)
        name = name.lower()
        if name in KEPT_HEADERS and self._in_head:  # what trails a body has no meaning
            if name in self._headers:
                if name == b"authorization":
                    self._context.authentication_failed("two_tokens", self._source)
                raise self._stop(InvalidInput(f"the header {name.decode()} is given twice"))
            self._headers[name] = value
        elif name in LISTED_HEADERS and self._in_head:
            self._headers[name] = self._headers[name] + b"," + value if name in self._headers else value

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._target = self._url
        parser, headers = self._parser, self._headers
        if parser.should_upgrade() and BODY_HEADERS & headers.keys():
            self._replayed_head = _without_upgrade(parser.get_method(), self._url, headers)
            return
        version = parser.get_http_version()
        self._require_plain_head(version)
        keeps = parser.should_keep_alive() and version != "1.0"
        exchange = HttpExchange(self, parser.get_method(), self._url, headers, closes=not keeps)
        self.deadline = self._context.now + self._limits.body_s
        announced = headers.get(b"content-length")
        if announced is not None and int(announced) > self._limits.body_bytes:
            raise self._stop(_too_large(self._limits.body_bytes))
        is_open = self._is_open(exchange)
        if self._internal:
            if not compare_digest(headers.get(b"falaj-secret", b""), self._internal):
                self._context.authentication_failed("refused_token", self._source)
                raise self._stop(Unauthenticated("this socket is for processes of the platform"))
            exchange.caller = exchange.holder = headers.get(b"falaj-caller", b"").decode("latin-1")
        elif is_open:
            self._require_no_body(headers)
        elif exchange.credential is None:
            self._context.authentication_failed("no_token", self._source)
            raise self._stop(Unauthenticated("no token was presented; send 'Authorization: Bearer …'"))
        if b"content-encoding" in headers and exchange.coding not in (b"", *CODINGS):
            raise self._stop(
                InvalidInput("this coding of the body is not known; send gzip, deflate or the plain body"),
                status=415,
            )
        self._current = exchange
        self._queue.append(exchange)
        if not (self._internal or is_open):
            holder = self._context.recognize(exchange.credential or "")
            if holder is None:
                self._authenticate(exchange)
            else:
                exchange.holder = holder
                if self._caller != holder:
                    self._introduce(holder)
        if b"expect" in headers:
            exchange.wants_continue = True
            self._send_continue()

    def _require_plain_head(self, version: str) -> None:
        """Refuse what HTTP/1.1 says is to be refused, and take the path out of an absolute target."""
        headers = self._headers
        if version not in ("1.0", "1.1"):
            raise self._stop(InvalidInput(f"HTTP/{version} is not spoken here; send HTTP/1.1"), status=505)
        if b"host" not in headers and version == "1.1":
            raise self._stop(InvalidInput("the header Host is missing"))
        if headers.get(b"expect", CONTINUES).lower() != CONTINUES:
            raise self._stop(InvalidInput("no expectation but 100-continue is known here"), status=417)
        if headers.get(b"transfer-encoding", CHUNKED).strip().lower() != CHUNKED:
            raise self._stop(InvalidInput("the body may be sent in chunks, in no other coding"), status=501)
        if not self._url.startswith(b"/"):
            scheme, is_absolute, rest = self._url.partition(b"://")
            if is_absolute and scheme.lower() in (b"http", b"https"):
                self._url = b"/" + rest.partition(b"/")[2]

    def _is_open(self, exchange: HttpExchange) -> bool:
        """Return whether a request needs no token."""
        if self._url in UNAUTHENTICATED_PATHS:
            return True
        if exchange.credential is not None:
            return False
        access = self._context.access
        return access.is_public(exchange.method, self._url) or access.is_preflight(
            exchange.method, self._headers
        )

    def header_lines(self, headers: Mapping[bytes, bytes]) -> bytes:
        return self._context.access.header_lines(headers)

    def _require_no_body(self, headers: Mapping[bytes, bytes]) -> None:
        if headers.get(b"content-length", b"0").strip(b"0") or b"transfer-encoding" in headers:
            raise self._stop(TooLarge("this path takes no body"))

    def _introduce(self, caller: str) -> None:
        """Count this connection as one of `caller`."""
        self._is_stranger = False
        count_for_caller(self._context, self, caller, before=self._caller)
        self._caller = caller

    def _authenticate(self, exchange: HttpExchange) -> None:
        """Have a token checked that is not known from memory, and read no further until it is."""
        exchange.holder = self._source
        self._unauthenticated += 1
        exchange.is_authenticated = False
        self._transport.pause_reading()
        self._context.authenticate(exchange, self._source, partial(self._authenticated, exchange))

    def _authenticated(self, exchange: HttpExchange, holder: str, error: FalajError | None) -> None:
        """Continue with a request whose token was checked, or refuse it and close the connection."""
        if exchange.cancelled:
            return
        if error is None and not self._context.shares.move(exchange.holder, holder, exchange.size):
            exchange.size, error = 0, too_much_held()
        if error is not None:  # reading stays paused
            if isinstance(error, Unauthenticated):
                self._context.authentication_failed("refused_token", self._source)
            exchange.closes = True
            if self._current is exchange:
                self._refused, self._current = True, None
            self._reject(exchange, error)
            return
        exchange.holder, exchange.is_authenticated = holder, True
        self._introduce(holder)
        self._unauthenticated -= 1
        self._resume_reading()
        if self._current is exchange:
            self._send_continue()
        else:
            self._context.dispatch(exchange)

    def on_body(self, body: bytes) -> None:
        exchange = self._current
        if exchange is None:
            return
        if exchange.size + len(body) > self._limits.body_bytes:
            raise self._stop(_too_large(self._limits.body_bytes))
        if not self._context.shares.take(exchange.holder, len(body)):
            raise self._stop(too_much_held())
        exchange.add(body)

    def on_message_complete(self) -> None:
        exchange, self._current = self._current, None
        if exchange is None:
            return
        exchange.wants_continue = False
        if self._whole:
            self._keep_head(exchange)
        self._complete(exchange)

    def _keep_head(self, exchange: HttpExchange) -> None:
        """Keep the head of a complete request for the next ones, if it is all that was received."""
        data, self._whole, self._repeated = self._whole, b"", None
        fits = self._head_bytes + MAX_DIGITS <= self._limits.head_bytes
        if fits and not exchange.closes and exchange.credential and exchange.holder == self._caller:
            self._repeated = kept_head(
                data, exchange.method, self._target, exchange.path, self._headers, exchange.credential
            )
            exchange.repeated = self._repeated

    def _complete(self, exchange: HttpExchange) -> None:
        """Dispatch a complete request, and read no more of them than may be pending."""
        if not self._write_paused:
            self.deadline = self._context.now + self._limits.idle_s
        if exchange.is_authenticated:
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
            last = not queue and self._current is None and (context.stopping or self._eof or self._leaves)
            closes = exchange.closes or last
            self._transport.write(exchange.to_bytes(closes=closes))
            if self._write_paused and exchange.size > LARGE_RESPONSE_BYTES:
                self._unread.append((exchange.holder, exchange.size))
            else:
                context.shares.release(exchange.holder, exchange.size)
            if closes:
                self._linger()
                return
        if self._read_paused and len(queue) < self._limits.pipelined:
            self._read_paused = False
            self._resume_reading()
        self._send_continue()

    def answer(self, request: RepeatedRequest, response: bytes) -> None:
        queue = self._queue
        if request.cancelled:
            return
        if len(queue) == 1 and not (self._leaves or self._eof or self._context.stopping):
            queue.clear()
            self._transport.write(response)
        else:
            request.response = response
            self.flush()

    def as_exchange(self, request: RepeatedRequest) -> HttpExchange | None:
        if request.cancelled:
            return None
        head, size = request.head, len(request.body)
        exchange = HttpExchange(self, head.method, head.path, head.headers, closes=False)
        self._queue[self._queue.index(request)] = exchange
        if not self._context.shares.take(self._caller, size):
            self._reject(exchange, too_much_held())
            return None
        exchange.holder, exchange.repeated = self._caller, head
        exchange.add(request.body)
        return exchange

    def holds(self, exchange: HttpExchange, size: int) -> bool:
        """Count the bytes of a large response as held for its caller; false if they exceed its share."""
        if not self._context.shares.take(exchange.holder, size):
            return False
        exchange.size += size
        return True

    def compress(self, exchange: HttpExchange, response: HttpResponse, coding: bytes) -> None:
        self._context.compress(exchange, response, coding)

    def _send_continue(self) -> None:
        """Send 100 Continue to a client that expects it, after all earlier responses."""
        first = self._queue[0] if self._queue else None
        if isinstance(first, HttpExchange) and first.wants_continue and first.is_authenticated:
            first.wants_continue = False
            self._transport.write(responses.CONTINUE)

    def _linger(self) -> None:
        """Close the write side, and give the client time to read before the connection is closed."""
        self._refused = self._lingers = True
        self.deadline = self._context.now + self._limits.linger_s
        for exchange in self._queue:
            self._context.shares.release(exchange.holder, exchange.size)
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
        exchange, self._current = self._current, None
        if exchange is None:
            exchange = HttpExchange(self, b"", b"", self._headers, closes=True)
            self._queue.append(exchange)
        exchange.closes = True
        self._reject(exchange, error, status=status)

    def _reject(self, exchange: HttpExchange, error: FalajError, *, status: int | None = None) -> None:
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
