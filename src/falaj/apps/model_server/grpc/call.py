"""A call of a gRPC method: its messages, whole and within limits, and its answer."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
import zlib
from collections.abc import Callable
from struct import Struct
from typing import TYPE_CHECKING, Any

from falaj.apps.model_server.connections import too_much_held
from falaj.apps.model_server.grpc import headers
from falaj.apps.model_server.grpc.headers import RequestHead
from falaj.apps.model_server.grpc.http2 import Http2Stream
from falaj.apps.model_server.grpc.statuses import StatusCode, code_of
from falaj.apps.model_server.http.exchange import LARGE_RESPONSE_BYTES
from falaj.apps.model_server.http.responses import HttpResponse
from falaj.apps.model_server.tracing.spans import RequestTrace
from falaj.errors import FalajError, Internal, InvalidInput, TooLarge, Unavailable
from falaj.serving.runtime.batch_queue import QueuedRequest

if TYPE_CHECKING:
    from falaj.apps.model_server.grpc.connection import GrpcConnection
    from falaj.apps.model_server.grpc.service import Method

PREFIX_BYTES = 5
MAX_TIMEOUT_S = 86_400.0
INLINE_COMPRESSED_BYTES = 1024
"""Larger compressed messages are decompressed in a thread; bytes may grow a thousandfold."""
OK_STATUS, GATEWAY_TIMEOUT, CLIENT_CLOSED = 200, 504, 499
"""The statuses of traces that are answered, whose deadline has passed, and whose client has gone."""
COMPRESSED_BYTES = range(1024, 256 * 1024)
"""Sizes of answers that are compressed for clients that compress their requests; larger ones would take too long."""

Work = Callable[[], bytes]
WorkDone = Callable[[bytes | None, FalajError | None], None]

_PREFIX = Struct(">BL")

_log = logging.getLogger(__name__)


class GrpcFailure(HttpResponse):
    """An error as the response of a prediction."""

    error: FalajError


class GrpcCall(Http2Stream):
    """A call with one message in. Those of one method share the handler in `method`.

    A call for inference is the exchange of its prediction. What few calls have is a default of the class.
    """

    is_unary = True
    holder = ""
    """Whose share of held bytes the call counts for: its caller, or the address until the token is checked."""
    size = 0
    is_authenticated = True
    is_complete = False
    """The request has arrived."""
    cancelled = False
    on_stop: Callable[[], None] | None = None
    queued: QueuedRequest | None = None
    trace: RequestTrace | None = None
    deadline: float | None = None
    """Event loop time after which nobody waits for the answer."""
    target: Any = None
    """What the message of an inference names."""
    request_id = ""
    _buffer: bytearray | None = None
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, connection: GrpcConnection, ident: int, head: RequestHead, method: Method) -> None:
        self.id = ident
        self._connection = connection
        self.head = head
        self.method = method
        self.credential = head.credential or ""
        self.began = time.perf_counter()
        if head.timeout_s is not None:
            self.deadline = connection.loop.time() + min(head.timeout_s, MAX_TIMEOUT_S)
            self._timer = connection.loop.call_at(self.deadline, self._expire)

    @property
    def call(self) -> GrpcCall:
        return self

    def header(self, name: bytes) -> bytes | None:
        """Return metadata that an inference may have."""
        return self.head.kept.get(name)

    # ------------------------------------------------------------------------------------- the request

    def received(self, data: bytes, *, ended: bool) -> None:
        if self.cancelled or not self.is_authenticated or (data and not self._hold(len(data))):
            return
        if self._buffer is None:
            if ended:
                self._complete(data)
                return
            self._buffer = bytearray()
        self._buffer += data
        if len(self._buffer) >= PREFIX_BYTES and not self.is_complete:
            _, announced = _PREFIX.unpack_from(self._buffer)
            if announced > self._connection.limits.body_bytes:
                self.fail(_too_large(self._connection.limits.body_bytes))
                return
            if len(self._buffer) > announced + PREFIX_BYTES:
                self.fail(InvalidInput("this method takes one message, and there is more"))
                return
        if ended:
            whole, self._buffer = bytes(self._buffer), bytearray()
            self._complete(whole)

    def _hold(self, size: int) -> bool:
        """Count bytes of the request as held; false, and refused, if there are too many."""
        if not self._connection.shares.take(self.holder, size):
            self.fail(too_much_held())
            return False
        self.size += size
        return True

    def _complete(self, data: bytes) -> None:
        self.is_complete = True
        size = len(data) - PREFIX_BYTES
        if size < 0 or _PREFIX.unpack_from(data)[1] != size:
            self.fail(InvalidInput("the request is not one whole message of gRPC"))
        elif size > self._connection.limits.body_bytes:
            self.fail(_too_large(self._connection.limits.body_bytes))
        elif data[0]:
            self._decompress(data[0], data[PREFIX_BYTES:])
        else:
            self._handle(data[PREFIX_BYTES:])

    def _decompress(self, flag: int, data: bytes) -> None:
        encoding = self.head.encoding
        if flag != 1 or encoding not in (b"gzip", b"deflate"):
            allowed = "gzip, deflate or identity"
            words = f"grpc-encoding: given {encoding.decode('latin-1')[:40]}, allowed {allowed}"
            self.fail(InvalidInput(words), code=StatusCode.UNIMPLEMENTED)
            return
        limit = self._connection.limits.body_bytes
        work = self._connection.service.run_apart if len(data) > INLINE_COMPRESSED_BYTES else _run_now
        work(lambda: decompress(data, limit), self._decompressed)

    def _decompressed(self, message: bytes | None, error: FalajError | None) -> None:
        if self.cancelled:
            return
        if error is not None or message is None:
            self.fail(error or InvalidInput("the message cannot be decompressed"))
        elif self._hold(len(message)):
            self._handle(message)

    def _handle(self, message: bytes) -> None:
        """Hand a message to the method; a failure there ends the call, and no other."""
        try:
            self.method.handle(self, message)
        except Exception:
            _log.exception("a call failed")
            self.fail(Internal("internal error; see the log of the server"))

    def authenticated(self, holder: str) -> None:
        """Continue after the token was checked; no data is taken meanwhile."""
        self.holder, self.is_authenticated = holder, True
        if self.remote_ended:
            self.received(b"", ended=True)

    def is_late(self, limit_s: float) -> bool:
        """Whether the request should have arrived by now."""
        return not self.is_complete and time.perf_counter() - self.began > limit_s

    @property
    def is_idle(self) -> bool:
        """Whether the call waits for nothing but what the client, or a change of health, may bring."""
        return self.on_stop is not None

    # -------------------------------------------------------------------------------------- the answer

    def finish(self, response: HttpResponse) -> None:
        """Answer with the response of a prediction."""
        if self.trace is not None:
            self.trace.end(response.status)
        if isinstance(response, GrpcFailure):
            self.fail(response.error)
        else:
            extra = headers.literal(b"falaj-logged", b"true") if response.extra else b""
            self.reply(response.body, extra=extra)

    def reply_packed(self, packed: bytes) -> None:
        """Answer with frames that are made."""
        if self.cancelled:
            return
        if self.trace is not None:
            self.trace.end(OK_STATUS)
        self.cancelled = True  # nothing more is to be done for this call
        self.queued = None  # it refers to this call: the two would stay until the garbage collector runs
        if self._timer is not None:
            self._timer.cancel()
        self._connection.session.answer_packed(self, packed)
        self._connection.written()

    def reply(self, message: bytes, *, extra: bytes = b"") -> None:
        """Answer with one message; `extra` are more fields of the trailers."""
        if self.cancelled:
            return
        size = len(message)
        if size > LARGE_RESPONSE_BYTES and not self._hold_answer(size):
            return
        self.cancelled = True  # nothing more is to be done for this call
        self.queued = None  # it refers to this call: the two would stay until the garbage collector runs
        if self._timer is not None:
            self._timer.cancel()
        session = self._connection.session
        if size in COMPRESSED_BYTES and self.head.accepts_gzip and self.head.encoding == b"gzip":
            packed = gzip.compress(message, 1)
            whole, head = _PREFIX.pack(1, len(packed)) + packed, headers.RESPONSE_GZIP
            session.answer(self, whole, head=head, end=headers.OK + extra)
        elif extra:
            session.answer(self, _PREFIX.pack(0, size) + message, end=headers.OK + extra)
        else:
            session.answer(self, _PREFIX.pack(0, size) + message)
        self._connection.written()

    def _hold_answer(self, size: int) -> bool:
        if self._connection.shares.take(self.holder, size):
            self.size += size
            return True
        self.fail(
            Unavailable(f"there is no memory for a response of {size} bytes; read the earlier ones first")
        )
        return False

    def send(self, message: bytes) -> None:
        """Send a message now."""
        session = self._connection.session
        if len(self.unsent) + len(message) > self._connection.limits.body_bytes:
            self.fail(Unavailable("the answers of this stream are not read"))
            return
        session.start(self)
        session.send(self, _PREFIX.pack(0, len(message)) + message)
        self._connection.written()

    def fail(self, error: FalajError, *, code: StatusCode | None = None) -> None:
        """Answer with an error."""
        wait_s = error.details.get("retry_after_s")
        self.end_with(code_of(error) if code is None else code, error.message, retry_after_s=wait_s)

    def end_with(self, code: StatusCode, message: str, *, retry_after_s: float | None = None) -> None:
        """End the call with a status."""
        self._stop()
        if self.ended or self.trailers is not None:
            return
        session = self._connection.session
        if self.started:
            session.end(self, headers.trailers(code, message, retry_after_s=retry_after_s))
        else:
            session.refuse(self, headers.refusal(code, message, retry_after_s=retry_after_s))
        self._connection.written()

    def refuse_plain(self, status: int) -> None:
        """Answer a request that is not one of gRPC."""
        self._stop()
        self._connection.session.refuse(self, headers.plain_response(status))
        self._connection.written()

    def was_reset(self) -> None:
        self._end_traces(CLIENT_CLOSED)
        self._stop()
        self.all_sent()

    def all_sent(self) -> None:
        self._connection.shares.release(self.holder, self.size)
        self.size = 0
        self._connection.stream_ended()

    def _expire(self) -> None:
        self._end_traces(GATEWAY_TIMEOUT)
        self.end_with(StatusCode.DEADLINE_EXCEEDED, "the deadline has passed before the answer was there")

    def _end_traces(self, status: int) -> None:
        if self.trace is not None:
            self.trace.end(status)

    def _stop(self) -> None:
        """Drop what is still being done for this call."""
        self.cancelled = True
        self._buffer = None
        if self._timer is not None:
            self._timer.cancel()
        if self.queued is not None:
            self.queued.cancelled = True
        if self.on_stop is not None:
            self.on_stop()


class StreamingCall(GrpcCall):
    """A call with any number of messages in and out, answered in their order."""

    is_unary = False

    def __init__(self, connection: GrpcConnection, ident: int, head: RequestHead, method: Method) -> None:
        super().__init__(connection, ident, head, method)
        self._answers: dict[int, bytes | None] = {}
        """Answers by the number of their message; None until there is one."""
        self._held: dict[int, int] = {}
        """Bytes that a message holds until it is answered."""
        self._taken = 0
        self.open_messages: dict[int, QueuedRequest] = {}
        self.traces: dict[int, RequestTrace] = {}
        """Those of messages that are not answered yet."""

    @property
    def wants_more(self) -> bool:
        return len(self._answers) < self._connection.limits.pipelined

    def is_late(self, limit_s: float) -> bool:
        return False

    @property
    def is_idle(self) -> bool:
        return not self._answers

    def received(self, data: bytes, *, ended: bool) -> None:
        if self.cancelled or not self.is_authenticated or (data and not self._hold(len(data))):
            return
        if self._buffer is None:
            self._buffer = bytearray()
        self._buffer += data
        self.is_complete = ended
        self._take_messages()

    def _take_messages(self) -> None:
        """Handle the complete messages among those that have arrived, as far as there is room for their answers."""
        limit = self._connection.limits.body_bytes
        while self._buffer is not None and len(self._buffer) >= PREFIX_BYTES and self.wants_more:
            flag, size = _PREFIX.unpack_from(self._buffer)
            if size > limit:
                self.fail(_too_large(limit))
                return
            if len(self._buffer) < PREFIX_BYTES + size:
                break
            message = bytes(self._buffer[PREFIX_BYTES : PREFIX_BYTES + size])
            del self._buffer[: PREFIX_BYTES + size]
            self._taken = PREFIX_BYTES + size
            if flag:
                message = self._inflated(message)
            if not self.cancelled:
                self._handle(message)
        if self.is_complete and self._buffer and self.wants_more and not self.cancelled:
            self.fail(InvalidInput("the last message is not whole"))
        self._end_if_done()

    def _inflated(self, data: bytes) -> bytes:
        limit = self._connection.limits.body_bytes
        message, error = attempt(lambda: decompress(data, limit))
        if message is None or error is not None or self.head.encoding not in (b"gzip", b"deflate"):
            self.fail(error or InvalidInput("the message cannot be decompressed"))
            return b""
        if self._hold(len(message)):
            self._taken += len(message)
        return message

    def expect_answer(self) -> int:
        """Return a number by which the answer to a message takes its place among the others."""
        number = next(reversed(self._answers), -1) + 1
        self._answers[number] = None
        self._held[number] = self._taken
        return number

    def answer(self, number: int, message: bytes) -> None:
        """Send the answer to a message, after those to earlier ones."""
        if self.cancelled:
            return
        self._answers[number] = message
        self.open_messages.pop(number, None)
        self.traces.pop(number, None)
        while self._answers and (ready := next(iter(self._answers.values()))) is not None:
            first = next(iter(self._answers))
            del self._answers[first]
            size = self._held.pop(first)
            self._connection.shares.release(self.holder, size)
            self.size -= size
            self.send(ready)
        if self._buffer:
            self._take_messages()
        else:
            self._end_if_done()
        if not self.ended:
            self._connection.session.grant(self)

    def _end_if_done(self) -> None:
        done = self.is_complete and not self._buffer and not self._answers
        if done and not self.cancelled:
            self._connection.session.start(self)
            self.end_with(StatusCode.OK, "")

    def _end_traces(self, status: int) -> None:
        for trace in self.traces.values():
            trace.end(status)

    def _stop(self) -> None:
        super()._stop()
        for queued in self.open_messages.values():
            queued.cancelled = True
        self.open_messages.clear()
        self._answers.clear()


def decompress(data: bytes, limit: int) -> bytes:
    """Return the content of a gzip or zlib message of at most `limit` bytes."""
    machine = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        found = machine.decompress(data, limit + 1)
    except zlib.error as error:
        raise InvalidInput(f"the message cannot be decompressed: {error}") from None
    if len(found) > limit:
        raise _too_large(limit)
    if not machine.eof:
        raise InvalidInput("the message cannot be decompressed: it is truncated")
    return found


def attempt(work: Work) -> tuple[bytes | None, FalajError | None]:
    try:
        return work(), None
    except FalajError as error:
        return None, error


def _run_now(work: Work, done: WorkDone) -> None:
    done(*attempt(work))


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the message exceeds the limit of {limit} bytes")
