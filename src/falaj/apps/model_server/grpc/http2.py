"""The server's side of HTTP/2 (RFC 9113) without I/O: bytes in, streams and bytes out. See decision record 0041."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct

import hpack

from falaj.apps.model_server.grpc.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    FRAME,
    FRAME_BYTES,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    MAX_FRAME,
    MAX_WINDOW,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    WORD,
    ConnectionFault,
    ErrorCode,
    Setting,
    frame,
    frame_start,
    require_size,
    without_padding,
)
from falaj.apps.model_server.grpc.headers import OK, RESPONSE, HeaderReader, NoRequest, RequestHead

SENT_FRAME = 65_536
"""Largest frame that is sent, where the client allows it."""
MAX_HEAD_BYTES = 16_384
MAX_CONTINUATIONS = 32
"""Frames of one header block."""
MAX_CUT = 1024
"""Streams that were reset of which a connection is remembered to have had frames on the way."""
PATIENCE = 2000.0
PATIENCE_PER_S = 100.0
PATIENCE_PER_ANSWER = 8.0
"""Frames that cost a client nothing (pings, settings, resets, empty data …) use up patience; time and answers
restore it. Without any, the connection ends: so are floods of such frames and rapid resets (CVE-2023-44487) bounded."""
BEFORE_MESSAGE, AFTER_MESSAGE = 2 * FRAME_BYTES + len(RESPONSE), FRAME_BYTES + len(OK)
"""Bytes around the message in a packed answer."""

_NOTHING = bytearray()
_START = Struct(f">5sL{len(RESPONSE)}sHBBBL")
_END = Struct(f">5sL{len(OK)}s")
_HEAD = frame_start(HEADERS, END_HEADERS, len(RESPONSE))
_TAIL = frame_start(HEADERS, END_HEADERS | END_STREAM, len(OK))


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """What a client may send."""

    streams: int = 256
    stream_window: int = 2**20
    connection_window: int = 2**23
    frame_bytes: int = DEFAULT_FRAME
    head_bytes: int = MAX_HEAD_BYTES


class Http2Stream(ABC):
    """A stream of a connection: a request that arrives in parts, and a response that leaves as windows allow."""

    window = 0
    receive_window = 0
    remote_ended = False
    """The client has sent all of its request."""
    started = False
    """The head of the response is sent."""
    ended = False
    """The stream is closed on both sides, or was reset."""
    unsent = _NOTHING
    trailers: bytes | None = None

    def __init__(self, ident: int) -> None:
        self.id = ident

    @abstractmethod
    def received(self, data: bytes, *, ended: bool) -> None:
        """Take a part of the request; `ended`: the last one."""

    @abstractmethod
    def was_reset(self) -> None:
        """The client no longer waits, or the connection is lost."""

    def all_sent(self) -> None:  # noqa: B027 - most need not know
        """The response has left."""

    @property
    def wants_more(self) -> bool:
        """Whether the client may send more of this request now."""
        return True


class Http2Session:
    """The state of one connection. `write` takes what is to be sent, `open_stream` makes the stream of a request."""

    def __init__(
        self,
        limits: Http2Limits,
        *,
        write: Callable[[bytes], None],
        open_stream: Callable[[int, RequestHead], Http2Stream],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.streams: dict[int, Http2Stream] = {}
        self.window = DEFAULT_WINDOW
        self.closed = False
        """Nothing more is read; the reason was sent."""
        self.going_away = False
        self.is_greeted = False
        """The client has sent its preface and settings."""
        self.held = False
        """Frames that have arrived wait until `resume`."""
        self.write_paused = False
        self._write = write
        self._open_stream = open_stream
        self._clock = clock
        self._heads = HeaderReader(limits.head_bytes)
        self._rest = b""
        self._is_prefaced = False
        self._expected: int | None = SETTINGS
        """The only type of frame that may come next: settings first, and the rest of a header block."""
        self._last = 0
        self._stream_window = DEFAULT_WINDOW
        self._frame_bytes = DEFAULT_FRAME
        self._receive_window = limits.connection_window
        self._whole_bytes = min(limits.frame_bytes, limits.stream_window)
        self._block = bytearray()
        self._block_of: tuple[int, int] | None = None
        self._continuations = 0
        self._declared_table = False
        self._blocked: dict[int, Http2Stream] = {}
        self._cut: dict[int, None] = {}
        """Streams that we have reset: frames may come that the client sent before it knew."""
        self._patience, self._patience_at = PATIENCE, clock()
        self._handlers = (
            *(self._on_data, self._on_headers, self._on_priority, self._on_reset, self._on_settings),
            *(self._on_push, self._on_ping, self._on_goaway, self._on_window_update, self._on_continuation),
        )

    # ---------------------------------------------------------------------------------------- receiving

    def greet(self) -> None:
        """Send our settings."""
        limits = self.limits
        settings = {
            Setting.MAX_CONCURRENT_STREAMS: limits.streams,
            Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
            Setting.MAX_FRAME_SIZE: limits.frame_bytes,
            Setting.MAX_HEADER_LIST_SIZE: limits.head_bytes,
        }
        body = b"".join(SETTING.pack(name, value) for name, value in settings.items())
        more = WORD.pack(limits.connection_window - DEFAULT_WINDOW)
        self._write(frame(SETTINGS, 0, 0, body) + frame(WINDOW_UPDATE, 0, 0, more))

    def feed(self, data: bytes) -> None:
        """Take bytes from the client."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        if not self._is_prefaced:
            if not self._read_preface(data):
                return
            data = data[len(PREFACE) :]
        at, end, unpack, limit = 0, len(data), FRAME.unpack_from, self.limits.frame_bytes
        try:
            while end - at >= FRAME_BYTES and not (self.closed or self.held):
                high, low, kind, flags, ident = unpack(data, at)
                body = at + FRAME_BYTES
                stop = body + (high << 8 | low)
                if stop - body > limit:
                    raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame exceeds {limit} bytes")
                if self._expected is not None and kind != self._expected:
                    raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} out of order")
                if stop > end:
                    break
                at = stop
                if kind == HEADERS and flags == END_HEADERS and ident & 1:
                    at = self._take_request(data, body, stop, ident)
                elif kind < len(self._handlers):
                    self._handlers[kind](flags, ident & MAX_WINDOW, data[body:stop])
                else:
                    self._charge()
        except ConnectionFault as fault:
            self.fail(fault.code, fault.words)
        self._rest = b"" if self.closed else data[at:]

    def resume(self) -> None:
        """Handle frames that have waited."""
        self.held = False
        self.feed(b"")

    @property
    def is_within_request(self) -> bool:
        """Whether a frame or a header block has begun to arrive."""
        return bool(self._rest) or self._block_of is not None

    def _read_preface(self, data: bytes) -> bool:
        """Return whether the preface is complete; keep its beginning."""
        if not PREFACE.startswith(data[: len(PREFACE)]):
            self.fail(
                ErrorCode.PROTOCOL_ERROR, "this port speaks gRPC, which begins with the preface of HTTP/2"
            )
            return False
        self._is_prefaced = len(data) >= len(PREFACE)
        self._rest = b"" if self._is_prefaced else data
        return self._is_prefaced

    def _take_request(self, data: bytes, body: int, stop: int, ident: int) -> int:
        """Open the stream of a header block; take the whole request if one frame with all of it follows, as usual.

        Return where the next frame begins.
        """
        block, start = data[body:stop], stop + FRAME_BYTES
        head = self._heads.known.get(block)
        if ident > MAX_WINDOW or len(data) < start or not isinstance(head, RequestHead):
            self._on_block(END_HEADERS, ident & MAX_WINDOW, block)
            return stop
        high, low, kind, flags, owner = FRAME.unpack_from(data, stop)
        size: int = high << 8 | low
        is_whole = (kind, flags, owner) == (DATA, END_STREAM, ident) and size <= self._whole_bytes
        if not is_whole or len(data) < start + size or not self._may_open(ident):
            self._on_block(END_HEADERS, ident, block)
            return stop
        stream = self._open(ident, head)
        if self.held:
            return stop
        self._receive(size)
        stream.remote_ended = True
        stream.received(data[start : start + size], ended=True)
        return start + size

    def _on_headers(self, flags: int, ident: int, body: bytes) -> None:
        if not ident & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"stream {ident} is not a client's")
        if flags & PADDED:
            body = without_padding(body)
        if flags & HAS_PRIORITY:
            if len(body) < 5 or WORD.unpack_from(body)[0] & MAX_WINDOW == ident:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "HEADERS with a wrong priority")
            body = body[5:]
        if flags & END_HEADERS:
            self._on_block(flags, ident, body)
            return
        self._block_of, self._continuations, self._expected = (ident, flags), 0, CONTINUATION
        self._block = bytearray(body)

    def _on_continuation(self, flags: int, ident: int, body: bytes) -> None:
        if self._block_of is None or self._block_of[0] != ident:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block += body
        self._continuations += 1
        if self._continuations > MAX_CONTINUATIONS or len(self._block) > self.limits.head_bytes:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large")
        if flags & END_HEADERS:
            first, self._block_of, self._expected = self._block_of[1], None, None
            self._on_block(first, ident, bytes(self._block))

    def _on_block(self, flags: int, ident: int, block: bytes) -> None:
        """Open the stream of a complete header block, or end a request whose trailers it has."""
        try:
            head = self._heads.read(block)
        except hpack.OversizedHeaderListError:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header list is too large") from None
        except (hpack.HPACKError, ValueError, IndexError):
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "a header block cannot be decoded") from None
        if ident <= self._last:
            self._on_trailers(flags, ident, head)
            return
        if isinstance(head, NoRequest) or not self._may_open(ident):
            self._last = ident
            self._charge()
            is_malformed = isinstance(head, NoRequest)
            self._cut_off(ident, ErrorCode.PROTOCOL_ERROR if is_malformed else ErrorCode.REFUSED_STREAM)
            return
        stream = self._open(ident, head)
        if flags & END_STREAM:
            stream.remote_ended = True
            stream.received(b"", ended=True)

    def _may_open(self, ident: int) -> bool:
        return ident > self._last and not self.going_away and len(self.streams) < self.limits.streams

    def _open(self, ident: int, head: RequestHead) -> Http2Stream:
        self._last = ident
        stream = self._open_stream(ident, head)
        stream.window, stream.receive_window = self._stream_window, self.limits.stream_window
        if not stream.ended:
            self.streams[ident] = stream
        return stream

    def _on_trailers(self, flags: int, ident: int, head: RequestHead | NoRequest) -> None:
        stream = self.streams.get(ident)
        if stream is None:
            if isinstance(head, RequestHead) or ident not in self._cut:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"stream {ident} is lower than one before")
            self._charge()
        elif stream.remote_ended:
            self._stream_fault(stream, ErrorCode.STREAM_CLOSED)
        elif head is not NoRequest.TRAILERS or not flags & END_STREAM:
            self._stream_fault(stream, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.remote_ended = True
            stream.received(b"", ended=True)

    def _on_data(self, flags: int, ident: int, body: bytes) -> None:
        size = len(body)
        self._receive(size)
        if flags & PADDED:
            body = without_padding(body)
        stream = self.streams.get(ident)
        if stream is None:
            self._require_known(ident, "DATA")
            self._charge()
            if ident not in self._cut:
                self._reset(ident, ErrorCode.STREAM_CLOSED)
            return
        if stream.remote_ended:
            self._stream_fault(stream, ErrorCode.STREAM_CLOSED)
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            self._stream_fault(stream, ErrorCode.FLOW_CONTROL_ERROR)
            return
        if flags & END_STREAM:
            stream.remote_ended = True
            stream.received(body, ended=True)
            return
        if not body:
            self._charge()
        stream.received(body, ended=False)
        if stream.receive_window < self.limits.stream_window >> 1:
            self.grant(stream)

    def _receive(self, size: int) -> None:
        """Count data that has arrived, whatever its stream."""
        self._receive_window -= size
        if self._receive_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window of the connection")
        if self._receive_window < self.limits.connection_window >> 1:
            self._grant_connection()

    def grant(self, stream: Http2Stream) -> None:
        """Let the client send more of a request, if the stream takes more."""
        missing = self.limits.stream_window - stream.receive_window
        if missing and not (stream.ended or stream.remote_ended) and stream.wants_more:
            stream.receive_window += missing
            self._write(frame(WINDOW_UPDATE, 0, stream.id, WORD.pack(missing)))

    def _grant_connection(self) -> None:
        missing = self.limits.connection_window - self._receive_window
        self._receive_window += missing
        self._write(frame(WINDOW_UPDATE, 0, 0, WORD.pack(missing)))

    def _on_priority(self, _flags: int, ident: int, body: bytes) -> None:
        if not ident:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY without a stream")
        self._charge()
        if len(body) != 5 or WORD.unpack_from(body)[0] & MAX_WINDOW == ident:
            code = ErrorCode.PROTOCOL_ERROR if len(body) == 5 else ErrorCode.FRAME_SIZE_ERROR
            stream = self.streams.get(ident)
            if stream is None:
                raise ConnectionFault(code, "PRIORITY with a wrong size or dependency")
            self._stream_fault(stream, code)

    def _on_reset(self, _flags: int, ident: int, body: bytes) -> None:
        require_size("RST_STREAM", body, 4)
        self._require_known(ident, "RST_STREAM")
        self._charge()
        stream = self.streams.get(ident)
        if stream is not None:
            self._forget(stream)
            stream.was_reset()

    def _on_settings(self, flags: int, ident: int, body: bytes) -> None:
        if ident:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & ACK:
            require_size("the acknowledgement of SETTINGS", body, 0)
            if not self.is_greeted:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            return
        if len(body) % SETTING.size:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with a wrong size")
        if self.is_greeted:
            self._charge()
        self.is_greeted, self._expected = True, None
        for name, value in SETTING.iter_unpack(body):
            self._set(name, value)
        self._write(frame(SETTINGS, ACK, 0))
        self._send_blocked()

    def _set(self, name: int, value: int) -> None:
        if name == Setting.INITIAL_WINDOW_SIZE:
            if value > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "an initial window over 2**31 - 1")
            change, self._stream_window = value - self._stream_window, value
            for stream in self.streams.values():
                stream.window += change
                if stream.window > MAX_WINDOW:
                    raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window over 2**31 - 1")
        elif name == Setting.MAX_FRAME_SIZE:
            if not DEFAULT_FRAME <= value <= MAX_FRAME:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of range")
            self._frame_bytes = min(value, SENT_FRAME)
        elif name == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1")

    def _on_push(self, _flags: int, _ident: int, _body: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _on_ping(self, flags: int, ident: int, body: bytes) -> None:
        require_size("PING", body, 8)
        if ident:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        self._charge()
        if not flags & ACK:
            self._write(frame(PING, ACK, 0, body))

    def _on_goaway(self, _flags: int, ident: int, body: bytes) -> None:
        if len(body) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY with a wrong size")
        if ident:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        self._charge()

    def _on_window_update(self, _flags: int, ident: int, body: bytes) -> None:
        require_size("WINDOW_UPDATE", body, 4)
        more = WORD.unpack(body)[0] & MAX_WINDOW
        self._charge()
        if not ident:
            self.window += more
            if not more or self.window > MAX_WINDOW:
                code = ErrorCode.FLOW_CONTROL_ERROR if more else ErrorCode.PROTOCOL_ERROR
                raise ConnectionFault(code, "WINDOW_UPDATE by 0, or to more than 2**31 - 1")
        else:
            self._require_known(ident, "WINDOW_UPDATE")
            stream = self.streams.get(ident)
            if stream is None:
                return
            stream.window += more
            if not more or stream.window > MAX_WINDOW:
                self._stream_fault(stream, ErrorCode.FLOW_CONTROL_ERROR if more else ErrorCode.PROTOCOL_ERROR)
        self._send_blocked()

    def _require_known(self, ident: int, name: str) -> None:
        if not ident & 1 or ident > self._last:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{name} on stream {ident}, which is not open")

    def _charge(self) -> None:
        """Count a frame that costs the client nothing."""
        self._patience = min(PATIENCE, self._patience) - 1
        if self._patience < 0:
            now = self._clock()
            since, self._patience_at = now - self._patience_at, now
            self._patience = min(PATIENCE, self._patience + since * PATIENCE_PER_S)
            if self._patience < 0:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that ask for nothing")

    def lose_patience(self, amount: float) -> None:
        """Count what makes a client suspicious, like a wrong token."""
        self._patience -= amount

    # ------------------------------------------------------------------------------------------ sending

    def answer(self, stream: Http2Stream, message: bytes, *, head: bytes = RESPONSE, end: bytes = OK) -> None:
        """Send a whole response: its head, one message and its trailers."""
        if head is RESPONSE and end is OK and len(message) <= self._frame_bytes:
            self.answer_packed(stream, pack_answer(stream.id, message))
            return
        self.start(stream, head)
        self.send(stream, message)
        self.end(stream, end)

    def answer_packed(self, stream: Http2Stream, packed: bytes) -> None:
        """Send a whole response whose frames are made: at once if the client's windows allow it, else in parts."""
        size = len(packed) - BEFORE_MESSAGE - AFTER_MESSAGE
        fits = size <= stream.window and size <= self.window and size <= self._frame_bytes
        if fits and self._declared_table and not stream.started:
            self.window -= size
            self._write(packed)
            self._sent_end(stream)
            return
        self.start(stream)
        self.send(stream, packed[BEFORE_MESSAGE:-AFTER_MESSAGE])
        self.end(stream, OK)

    def start(self, stream: Http2Stream, head: bytes = RESPONSE) -> None:
        """Send the head of a response."""
        if not stream.started:
            stream.started = True
            self._write(frame(HEADERS, END_HEADERS, stream.id, self._declared(head)))

    def send(self, stream: Http2Stream, data: bytes) -> None:
        """Send a part of a response, or keep it until the client's windows allow it."""
        if stream.unsent:
            stream.unsent += data
        else:
            stream.unsent = bytearray(data)
        self._send_some(stream)

    def end(self, stream: Http2Stream, trailers: bytes) -> None:
        """End a response once all of it is sent."""
        stream.trailers = trailers
        self._send_some(stream)

    def refuse(self, stream: Http2Stream, block: bytes) -> None:
        """Answer with a header block alone."""
        stream.started = True
        self._write(frame(HEADERS, END_HEADERS | END_STREAM, stream.id, self._declared(block)))
        self._sent_end(stream)

    def stream_reset(self, stream: Http2Stream, code: ErrorCode) -> None:
        """End a stream on both sides."""
        self._forget(stream)
        self._cut_off(stream.id, code)

    def go_away(self) -> None:
        """Accept no more requests; those that are open are still answered."""
        if not self.going_away and not self.closed:
            self.going_away = True
            self._write(frame(GOAWAY, 0, 0, WORD.pack(self._last) + WORD.pack(ErrorCode.NO_ERROR)))

    def fail(self, code: ErrorCode, words: str) -> None:
        """End the connection and say why."""
        if not self.closed:
            self.closed = True
            body = WORD.pack(self._last) + WORD.pack(code) + words.encode()
            self._write(frame(GOAWAY, 0, 0, body))

    def resume_writing(self) -> None:
        """Send what waited for the transport."""
        self.write_paused = False
        self._send_blocked()

    def _send_blocked(self) -> None:
        """Send what the windows allow now, one frame of each stream in turn."""
        while self._blocked and self.window > 0 and not self.write_paused:
            before = self.window
            for stream in list(self._blocked.values()):
                self._send_some(stream)
            if self.window == before:
                return

    def _send_some(self, stream: Http2Stream) -> None:
        """Send one frame of a stream if it may, and the trailers after the last one."""
        if stream.ended:
            return
        size = min(len(stream.unsent), stream.window, self.window, self._frame_bytes)
        if size > 0 and not self.write_paused:
            part = bytes(memoryview(stream.unsent)[:size])
            del stream.unsent[:size]
            stream.window -= size
            self.window -= size
            self._patience += 2
            self._write(frame(DATA, 0, stream.id, part))
        if stream.unsent:
            self._blocked[stream.id] = stream
            return
        self._blocked.pop(stream.id, None)
        if stream.trailers is not None:
            block = self._declared(stream.trailers)
            self._write(frame(HEADERS, END_HEADERS | END_STREAM, stream.id, block))
            self._sent_end(stream)

    def _declared(self, block: bytes) -> bytes:
        """Return a header block; the first one declares that we use no dynamic table."""
        if self._declared_table:
            return block
        self._declared_table = True
        return b"\x20" + block

    def _sent_end(self, stream: Http2Stream) -> None:
        if not stream.remote_ended:
            self._cut_off(stream.id, ErrorCode.NO_ERROR)
        self._patience += PATIENCE_PER_ANSWER
        self._forget(stream)
        stream.all_sent()

    def _stream_fault(self, stream: Http2Stream, code: ErrorCode) -> None:
        self._charge()
        self.stream_reset(stream, code)
        stream.was_reset()

    def _forget(self, stream: Http2Stream) -> None:
        stream.ended = True
        self.streams.pop(stream.id, None)
        self._blocked.pop(stream.id, None)

    def _cut_off(self, ident: int, code: ErrorCode) -> None:
        """Reset a stream that the client may still write to until it knows."""
        self._cut[ident] = None
        if len(self._cut) > MAX_CUT:
            del self._cut[next(iter(self._cut))]
        self._reset(ident, code)

    def _reset(self, ident: int, code: ErrorCode) -> None:
        self._write(frame(RST_STREAM, 0, ident, WORD.pack(code)))


def pack_answer(stream: int, message: bytes) -> bytes:
    """Return the frames of a whole response: its head, one message and its trailers."""
    size = len(message)
    start = _START.pack(_HEAD, stream, RESPONSE, size >> 8, size & 255, DATA, 0, stream)
    return start + message + _END.pack(_TAIL, stream, OK)
