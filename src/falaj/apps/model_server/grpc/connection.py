"""A connection of gRPC clients: HTTP/2 on a transport, tokens checked once, limited in bytes, streams and time."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, cast

from falaj.apps.model_server.connections import (
    ServerContext,
    address_of,
    count_for_caller,
    spare_connection,
    stop_counting,
)
from falaj.apps.model_server.grpc.call import GrpcCall
from falaj.apps.model_server.grpc.frames import ErrorCode
from falaj.apps.model_server.grpc.headers import RequestHead
from falaj.apps.model_server.grpc.http2 import (
    MAX_HEAD_BYTES,
    Http2Limits,
    Http2Session,
    Http2Stream,
)
from falaj.apps.model_server.grpc.statuses import StatusCode
from falaj.errors import FalajError, InvalidInput, Unauthenticated

if TYPE_CHECKING:
    from falaj.apps.model_server.grpc.service import GrpcService

HTTP1_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"this port speaks gRPC; REST is on serving.port\n"
)
WRONG_TOKEN_COST = 100.0
"""Patience that a wrong token costs: about twenty in a row end the connection."""


class GrpcConnection(asyncio.Protocol):
    """Reads frames, opens calls, and writes what they answer once per turn of the event loop."""

    def __init__(self, context: ServerContext, service: GrpcService) -> None:
        self._context = context
        self.service = service
        self.limits = context.limits
        self.shares = context.shares
        self.loop = asyncio.get_running_loop()
        self.session = Http2Session(
            Http2Limits(head_bytes=min(MAX_HEAD_BYTES, self.limits.head_bytes)),
            write=self._queue_write,
            open_stream=self._open_call,
        )
        self._out: list[bytes] = []
        self._is_feeding = False
        self._flushes = False
        self._source = ""
        self._caller = ""
        self._is_stranger = True
        self._credential: str | None = None
        self._recognized_at = -1.0
        self._unauthenticated = False
        self._write_paused = False
        self._began = self._active = context.now
        """When the connection, and its last activity, began."""
        self._progress = context.now
        """When the client last read something, or had nothing to read."""
        self._partial_since: float | None = None
        self.deadline = context.now + self.limits.head_s

    # ------------------------------------------------------------------------------------ the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        context = self._context
        self._source = address_of(transport)
        context.connections.add(self)
        context.metrics.connections += 1
        if len(context.connections) > self.limits.connections:
            spare = spare_connection(context)
            if spare is None:
                self._transport.abort()
                return
            spare.abort()
        context.strangers[self] = None
        self.session.greet()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        stop_counting(self._context, self, self._caller)
        self.session.closed = True
        streams, self.session.streams = self.session.streams, {}
        for stream in streams.values():
            stream.ended = True
            stream.was_reset()

    def data_received(self, data: bytes) -> None:
        session = self.session
        self._is_feeding = True
        session.feed(data)
        self._is_feeding = False
        self._active = now = self._context.now
        if not session.is_within_request:
            self._partial_since = None
        elif self._partial_since is None:
            self._partial_since = now
        if self._out:
            self._flush()
        if session.closed:
            self._close_failed(data)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._write_paused = self.session.write_paused = True
        self._progress = self._context.now
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._progress = self._context.now
        self.session.resume_writing()
        self.written()
        if not self._unauthenticated:
            self._transport.resume_reading()

    def expire(self) -> None:
        """Look for what takes too long. A deadline here is the time of the next look."""
        now, limits = self._context.now, self.limits
        self.deadline = now + limits.head_s
        unread_s = now - self._progress if self._write_paused else 0.0
        if unread_s > limits.body_s or not self.session.is_greeted:
            self._transport.abort()
        elif self._partial_since is not None and now - self._partial_since > limits.head_s:
            self._end(ErrorCode.ENHANCE_YOUR_CALM, "a frame did not arrive in time")
        elif self._has_unread() and now - self._progress > limits.body_s:
            self._transport.abort()
        elif not self.session.streams and now - self._active > limits.idle_s:
            self.close_when_idle()
        else:
            self._expire_calls(now)

    def _has_unread(self) -> bool:
        """Whether a client leaves an answer unread by not opening its window."""
        waiting = any(stream.unsent for stream in self.session.streams.values())
        if not waiting:
            self._progress = self._context.now
        return waiting

    def _expire_calls(self, now: float) -> None:
        """End calls whose request has not arrived in time."""
        for stream in list(self.session.streams.values()):
            call = cast(GrpcCall, stream)
            if call.is_late(self.limits.body_s):
                call.fail(InvalidInput("the request did not arrive in time"), code=StatusCode.CANCELLED)

    def close_when_idle(self) -> None:
        """Close now if no call is open, else after the last answer."""
        self.session.go_away()
        self._flush()
        self.service.end_idle_calls(self.session.streams.values())
        self.stream_ended()

    def abort(self) -> None:
        """Close at once. The connection no longer counts, though the transport reports its loss only later."""
        stop_counting(self._context, self, self._caller)
        self._transport.abort()

    @property
    def pending(self) -> int:
        """The number of calls that are not answered yet."""
        return len(self.session.streams)

    def close_after_response(self) -> None:
        """Have the client open another connection: calls that are open are still answered here."""
        self.session.go_away()
        self._flush()
        self.stream_ended()

    @property
    def waits_for_client(self) -> bool:
        return not any(stream.remote_ended for stream in self.session.streams.values())

    def _end(self, code: ErrorCode, words: str) -> None:
        self.session.fail(code, words)
        self._flush()
        self._close_failed(b"")

    def _close_failed(self, data: bytes) -> None:
        """Close a connection whose client broke the protocol."""
        if not self.session.is_greeted and data[:4] in (b"GET ", b"POST", b"PUT ", b"HEAD"):
            self._transport.write(HTTP1_ANSWER)
        self._transport.close()

    # ------------------------------------------------------------------------------------------ writing

    def _queue_write(self, data: bytes) -> None:
        self._out.append(data)

    def written(self) -> None:
        """Send what was written, together with what else is written in this turn of the event loop."""
        if self._is_feeding or not self._out or self._flushes:
            return
        if not self.session.streams:
            self._flush()
        else:
            self._flushes = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        out = self._out
        if out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
            out.clear()

    def stream_ended(self) -> None:
        """Close the connection after its last call, if it is to be closed."""
        if self.session.going_away and not self.session.streams and not self.session.closed:
            self.session.closed = True
            self._flush()
            self._transport.close()

    # -------------------------------------------------------------------------------------------- calls

    def _open_call(self, ident: int, head: RequestHead) -> Http2Stream:
        method = self.service.method(head.path)
        call = method.call(self, ident, head, method)
        if head.status != 200:
            call.refuse_plain(head.status)
        elif head.given_twice is not None:
            if head.given_twice == b"authorization":
                self._context.authentication_failed("two_tokens", self._source)
            call.fail(InvalidInput(f"the metadata {head.given_twice.decode()} is given twice"))
        elif method.is_public:
            call.holder = self._source
        elif head.credential is None:
            self._context.authentication_failed("no_token", self._source)
            call.fail(Unauthenticated("no token was presented; send the metadata 'authorization: Bearer …'"))
        elif head.credential is self._credential and self._recognized_at == self._context.now:
            call.holder = self._caller
        else:
            self._identify(call, head.credential)
        return call

    def _identify(self, call: GrpcCall, credential: str) -> None:
        """Find the caller of a token: from memory, or in a thread while nothing is read."""
        holder = self._context.recognize(credential)
        if holder is not None:
            self._introduce(holder, credential)
            call.holder = holder
            return
        call.holder, call.is_authenticated = self._source, False
        self._unauthenticated = self.session.held = True
        self._transport.pause_reading()
        done = partial(self._authenticated, call, credential)
        self.service.decisions.authenticate(credential, self._source, done)

    def _authenticated(self, call: GrpcCall, credential: str, holder: str, error: FalajError | None) -> None:
        if self.session.closed:
            return
        if error is None:
            self._introduce(holder, credential)
            if not call.cancelled:
                call.authenticated(holder)
        else:
            if isinstance(error, Unauthenticated):
                self._context.authentication_failed("refused_token", self._source)
                self.session.lose_patience(WRONG_TOKEN_COST)
            call.fail(error)
        self._unauthenticated = self.session.held = False
        self.loop.call_soon(self._resume)

    def _resume(self) -> None:
        """Handle the frames that waited for the check of a token."""
        if self.session.closed:
            return
        self.data_received(b"")
        if not (self._unauthenticated or self._write_paused or self.session.closed):
            self._transport.resume_reading()

    def _introduce(self, caller: str, credential: str) -> None:
        """Count this connection as one of `caller`."""
        self._credential, self._recognized_at = credential, self._context.now
        if caller != self._caller or self._is_stranger:
            self._is_stranger = False
            count_for_caller(self._context, self, caller, before=self._caller)
            self._caller = caller
