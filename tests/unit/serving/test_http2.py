"""Our side of HTTP/2 against the package h2, frame by frame, and against frames that break the rules."""

from __future__ import annotations

import struct

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import hpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from falaj.apps.model_server.grpc import http2
from falaj.apps.model_server.grpc.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    frame,
)
from falaj.apps.model_server.grpc.headers import OK, RequestHead, literal, trailers
from falaj.apps.model_server.grpc.http2 import Http2Limits, Http2Session, Http2Stream

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a.B/C"),
    (":authority", "test"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("authorization", "Bearer secret"),
]
BLOCK = hpack.Encoder().encode(REQUEST)
PLAIN = b"".join(literal(name.encode(), value.encode()) for name, value in REQUEST)
"""A head that leaves the dynamic table as it is, so that it is known when it comes again."""
TRAILERS = hpack.Encoder().encode([("checksum", "7")], huffman=False)


class Echo(Http2Stream):
    """Answers with what it was sent, so many times."""

    def __init__(self, wire: Wire, ident: int) -> None:
        super().__init__(ident)
        self.wire = wire
        self.data = b""
        self.was_lost = False

    def received(self, data: bytes, *, ended: bool) -> None:
        self.data += data
        if ended:
            self.wire.session.answer(self, self.data * self.wire.times)

    def was_reset(self) -> None:
        self.was_lost = True


class Wire:
    """A session whose bytes a test sees."""

    def __init__(self, *, times: int = 1, limits: Http2Limits | None = None, now: float = 0.0) -> None:
        self.times = times
        self.now = now
        self.out = bytearray()
        self.opened: list[Echo] = []
        self.heads: list[RequestHead] = []
        self.session = Http2Session(
            limits or Http2Limits(), write=self.out.extend, open_stream=self._open, clock=lambda: self.now
        )
        self.session.greet()

    def _open(self, ident: int, head: RequestHead) -> Echo:
        self.heads.append(head)
        self.opened.append(Echo(self, ident))
        return self.opened[-1]

    def sent(self) -> bytes:
        found = bytes(self.out)
        self.out.clear()
        return found

    def greeted(self) -> Wire:
        self.session.feed(PREFACE + frame(SETTINGS, 0, 0))
        self.sent()
        return self

    @property
    def fault(self) -> int | None:
        """The code by which the connection was ended, if it was."""
        for kind, _, _, body in frames(bytes(self.out)):
            if kind == GOAWAY:
                return int(struct.unpack_from(">L", body, 4)[0])
        return None

    @property
    def resets(self) -> list[tuple[int, int]]:
        return [
            (stream, int.from_bytes(body, "big"))
            for kind, _, stream, body in frames(bytes(self.out))
            if kind == RST_STREAM
        ]


def frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 3], "big")
        kind, flags, stream = struct.unpack_from(">BBL", data, at + 3)
        found.append((kind, flags, stream, data[at + 9 : at + 9 + size]))
        at += 9 + size
    return found


def h2_client(window: int) -> h2.connection.H2Connection:
    made = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    made.local_settings = h2.settings.Settings(
        client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
    )
    made.initiate_connection()
    return made


# --------------------------------------------------------------------------------------- beside h2


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(0, 40_000), min_size=1, max_size=5),
    times=st.integers(0, 4),
    window=st.integers(300, 100_000),
    step=st.integers(5, 50_000),
    together=st.booleans(),
)
def test_h2_reads_every_answer(sizes: list[int], times: int, window: int, step: int, together: bool) -> None:
    """Flow control holds both ways: h2 raises if a window is exceeded or a frame is out of order."""
    client = h2_client(window)
    wire = Wire(times=times)
    answers: dict[int, bytes] = {}
    heads: dict[int, dict[str, str]] = {}
    ends: set[int] = set()
    unsent = {2 * n + 1: bytes([n % 251]) * size for n, size in enumerate(sizes)}
    wanted = {stream: data * times for stream, data in unsent.items()}
    for stream in unsent:
        client.send_headers(stream, REQUEST)
    for _ in range(20_000):
        for stream in list(unsent):
            size = min(
                client.local_flow_control_window(stream), client.max_outbound_frame_size, len(unsent[stream])
            )
            client.send_data(stream, unsent[stream][:size], end_stream=size == len(unsent[stream]))
            unsent[stream] = unsent[stream][size:]
            if not unsent[stream]:
                del unsent[stream]
            if not together:
                break
        sent = client.data_to_send()
        for at in range(0, len(sent), step):
            wire.session.feed(sent[at : at + step])
        for event in client.receive_data(wire.sent()):
            if isinstance(event, h2.events.ResponseReceived):
                heads[event.stream_id] = dict(event.headers)
            elif isinstance(event, h2.events.DataReceived):
                answers[event.stream_id] = answers.get(event.stream_id, b"") + event.data
                client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.TrailersReceived):
                assert dict(event.headers) == {"grpc-status": "0"}
            elif isinstance(event, h2.events.StreamEnded):
                ends.add(event.stream_id)
        if len(ends) == len(sizes):
            break

    assert {stream: answers.get(stream, b"") for stream in ends} == wanted
    assert all(head == {":status": "200", "content-type": "application/grpc"} for head in heads.values())
    assert not wire.session.streams
    assert not wire.session.closed


Step = tuple[int, int, int, bytes]

kinds = st.sampled_from([*range(10), 0x20])
small = st.integers(0, 12)
bodies = st.sampled_from(
    [
        b"",
        b"\0" * 4,
        b"\0\0\0\1",
        b"\0" * 5,
        b"\0" * 6,
        b"\0" * 8,
        b"\x7f\xff\xff\xff",
        BLOCK,
        TRAILERS,
        b"\xff" * 9,
    ]
)
settings_bodies = st.sampled_from([b"", b"\0\4\0\0\1\0", b"\0\5\0\0\0\1", b"\0\2\0\0\0\2", b"\0\4\xff\0\0\0"])
steps = st.one_of(
    st.tuples(kinds, st.integers(0, 63), small, bodies),
    st.tuples(
        st.just(HEADERS),
        st.sampled_from([4, 5, 1]),
        st.sampled_from([1, 3, 5, 7]),
        st.sampled_from([BLOCK, PLAIN]),
    ),
    st.tuples(st.just(DATA), st.sampled_from([0, 1]), st.sampled_from([1, 3]), st.binary(max_size=9)),
    st.tuples(st.just(WINDOW_UPDATE), st.just(0), small, st.sampled_from([b"\0\0\0\1", b"\0" * 4])),
    st.tuples(st.just(SETTINGS), st.just(0), st.just(0), settings_bodies),
    st.tuples(st.just(RST_STREAM), st.just(0), small, st.just(b"\0\0\0\x08")),
)


class Counterpart:
    """The server's side of h2, which answers nothing, beside ours."""

    def __init__(self) -> None:
        self.server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.server.initiate_connection()
        self.server.receive_data(PREFACE + frame(SETTINGS, 0, 0))

    def accepts(self, step: Step) -> bool | None:
        """Return whether the connection goes on; None if a rule of one stream was broken, which h2 may also raise."""
        try:
            self.server.receive_data(frame(*step))
        except h2.exceptions.StreamClosedError:
            return None
        except h2.exceptions.ProtocolError:
            return False
        return True


class Silent(Wire):
    """A session whose streams are never answered."""

    def _open(self, ident: int, head: RequestHead) -> Echo:
        stream = super()._open(ident, head)
        stream.received = lambda data, ended: None  # type: ignore[method-assign]
        return stream


OF_A_STREAM = {
    (HEADERS, ErrorCode.PROTOCOL_ERROR): "8.1.1: a malformed request",
    (CONTINUATION, ErrorCode.PROTOCOL_ERROR): "8.1.1: a malformed request",
    (HEADERS, ErrorCode.STREAM_CLOSED): "5.1: HEADERS after the end of a request",
    (CONTINUATION, ErrorCode.STREAM_CLOSED): "5.1: HEADERS after the end of a request",
    (DATA, ErrorCode.STREAM_CLOSED): "6.1: DATA on a stream that is not open",
    (WINDOW_UPDATE, ErrorCode.PROTOCOL_ERROR): "6.9: a window that grows by 0",
    (WINDOW_UPDATE, ErrorCode.FLOW_CONTROL_ERROR): "6.9.1: a window over 2**31 - 1",
    (PRIORITY, ErrorCode.PROTOCOL_ERROR): "5.3.1 of RFC 7540: a stream that depends on itself",
    (PRIORITY, ErrorCode.FRAME_SIZE_ERROR): "6.3: PRIORITY with a wrong size",
}
"""Errors of one stream by RFC 9113, for which h2 ends the connection: the frame, our code, and the section."""


def ends_by_the_standard(step: Step, highest: int) -> str | None:
    """Return the section of RFC 9113 by which a frame ends the connection, although h2 goes on."""
    kind, _, stream, _ = step
    if stream % 2 == 0:
        return "5.1.1: a stream that only a server may open"
    if kind == HEADERS and stream <= highest:
        return "5.1.1: HEADERS on a stream that is over"
    if kind == RST_STREAM and stream > highest:
        return "6.4: a reset of a stream that is not open yet"
    if kind == CONTINUATION:
        return "6.10: CONTINUATION without HEADERS"
    if kind == PUSH_PROMISE:
        return "8.4: PUSH_PROMISE from a client; h2 waits for its CONTINUATION"
    return None


def goes_on_by_the_standard(step: Step, highest: int, resets: list[tuple[int, int]]) -> str | None:
    """Return the section of RFC 9113 by which a frame does not end the connection, although h2 ends it."""
    kind, _, stream, _ = step
    if kind == WINDOW_UPDATE and stream <= highest and not resets:
        return "5.1: WINDOW_UPDATE on a stream that is over"
    return OF_A_STREAM.get((kind, ErrorCode(resets[0][1]))) if resets else None


def compare(sequence: list[Step]) -> None:
    """Check that both end the connection at the same frame, except where a section of the standard is named.

    h2 takes no frame after a GOAWAY, where 6.8 lets a client finish what it has begun: the comparison ends there.
    """
    ours, theirs = Silent().greeted(), Counterpart()
    for step in sequence:
        accepted, resets, highest = theirs.accepts(step), len(ours.resets), ours.session._last
        ours.session.feed(frame(*step))
        if accepted is None or (step[0] == GOAWAY and accepted and not ours.session.closed):
            return
        if accepted and ours.session.closed:
            assert ends_by_the_standard(step, highest), (step, ours.fault)
            return
        if not accepted:
            section = goes_on_by_the_standard(step, highest, ours.resets[resets:])
            assert ours.session.closed or section, (step, ours.resets)
            return


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=8))
def test_connections_end_where_h2_ends_them(sequence: list[Step]) -> None:
    compare(sequence)


@pytest.mark.on_request("FALAJ_FUZZ")
@pytest.mark.timeout(3600)
def test_connections_end_where_h2_ends_them_for_long() -> None:
    long = settings(max_examples=200_000, deadline=None, suppress_health_check=list(HealthCheck))
    long(given(st.lists(steps, max_size=30))(compare))()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_raise(data: bytes, greeted: bool) -> None:
    wire = Wire()
    wire.session.feed((PREFACE + frame(SETTINGS, 0, 0) if greeted else b"") + data)

    assert not wire.session.closed or wire.fault is not None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), max_size=4), max_size=12),
    st.integers(0, 4096),
)
def test_blocks_mean_the_same_with_and_without_the_cache(
    lists: list[list[tuple[str, str]]], table_size: int
) -> None:
    """Repeated blocks are looked up; a plain decoder of the same blocks says what they mean."""
    encoder, plain = hpack.Encoder(), hpack.Decoder()
    encoder.header_table_size = table_size
    wire = Wire().greeted()
    for number, extra in enumerate(lists * 2):
        credential = f"Bearer {''.join(value for _, value in extra)}."
        fields = [
            *REQUEST[:-1],
            ("authorization", credential),
            *((f"x-{name}", value) for name, value in extra),
        ]
        block = encoder.encode(fields)
        expected = dict(plain.decode(block))["authorization"].removeprefix("Bearer ")
        wire.session.feed(frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, block))

        assert wire.heads[-1].credential == expected


whole_requests = st.tuples(st.integers(0, 8), st.binary(max_size=40), st.sampled_from([0, PADDED]))


def whole_request(number: int, data: bytes, flags: int) -> bytes:
    body = bytes((2,)) + data + b"\0\0" if flags else data
    return headers_of(2 * number + 1, block=PLAIN) + frame(DATA, END_STREAM | flags, 2 * number + 1, body)


def compare_cuts(parts: list[Step | tuple[int, bytes, int]], size: int, window: int) -> None:
    """Check that frames mean the same however they are cut: a whole request in one go takes a shorter way."""
    sent = b"".join(frame(*part) if len(part) == 4 else whole_request(*part) for part in parts)
    limits = Http2Limits(streams=3, stream_window=window)
    together, apart = Wire(limits=limits).greeted(), Wire(limits=limits).greeted()
    together.session.feed(sent)
    for at in range(0, len(sent), size):
        apart.session.feed(sent[at : at + size])

    assert together.sent() == apart.sent()
    assert [stream.data for stream in together.opened] == [stream.data for stream in apart.opened]
    assert list(together.session.streams) == list(apart.session.streams)


cuts = (st.lists(st.one_of(whole_requests, steps), max_size=8), st.integers(1, 300), st.integers(0, 30))


@settings(max_examples=200, deadline=None)
@given(*cuts)
def test_frames_mean_the_same_however_they_are_cut(
    parts: list[Step | tuple[int, bytes, int]], size: int, window: int
) -> None:
    compare_cuts(parts, size, window)


@pytest.mark.on_request("FALAJ_FUZZ")
@pytest.mark.timeout(3600)
def test_frames_mean_the_same_however_they_are_cut_for_long() -> None:
    long = settings(max_examples=100_000, deadline=None, suppress_health_check=list(HealthCheck))
    long(given(*cuts)(compare_cuts))()


def test_data_waits_while_the_token_of_a_known_head_is_checked_again() -> None:
    wire = Wire().greeted()
    for stream, data in ((1, b"one"), (3, b"two")):
        wire.session.feed(headers_of(stream, block=PLAIN) + frame(DATA, END_STREAM, stream, data))
    opens = wire.session._open_stream

    def hold(ident: int, head: RequestHead) -> Http2Stream:
        wire.session.held = True
        return opens(ident, head)

    wire.session._open_stream = hold
    wire.session.feed(headers_of(5, block=PLAIN) + frame(DATA, END_STREAM, 5, b"three"))
    before = wire.opened[-1].data
    wire.session.resume()

    assert (before, [stream.data for stream in wire.opened]) == (b"", [b"one", b"two", b"three"])


# ----------------------------------------------------------------------------------------- attacks


def headers_of(stream: int, *, flags: int = END_HEADERS, block: bytes = BLOCK) -> bytes:
    return frame(HEADERS, flags, stream, block)


def flood(data: bytes, *, times: int = 5000) -> Wire:
    wire = Wire().greeted()
    for _ in range(times):
        if wire.session.closed:
            break
        wire.session.feed(data)
    return wire


@pytest.mark.parametrize(
    "data",
    [
        frame(PING, 0, 0, b"\0" * 8),
        frame(SETTINGS, 0, 0),
        frame(SETTINGS, 0, 0, b"\0\4\0\0\1\0"),
        frame(PRIORITY, 0, 1, b"\0" * 5),
        frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
        frame(0x20, 0, 0, b"unknown"),
    ],
)
def test_floods_of_frames_that_cost_nothing_end_the_connection(data: bytes) -> None:
    assert flood(data).fault == ErrorCode.ENHANCE_YOUR_CALM


def test_rapid_resets_end_the_connection() -> None:
    wire = Wire().greeted()
    for stream in range(1, 20_001, 2):
        wire.session.feed(headers_of(stream) + frame(RST_STREAM, 0, stream, b"\0\0\0\x08"))
        if wire.session.closed:
            break

    assert wire.fault == ErrorCode.ENHANCE_YOUR_CALM
    assert all(stream.was_lost for stream in wire.opened[:-1])
    assert len(wire.opened) <= 2001


def test_patience_comes_back_with_time_and_answers() -> None:
    wire = Wire().greeted()
    ping = frame(PING, 0, 0, b"\0" * 8)
    for _ in range(30):
        wire.session.feed(ping * 1000)
        wire.now += 10
    for stream in range(1, 10_001, 2):
        request = headers_of(stream) + frame(DATA, END_STREAM, stream, b"abc")
        wire.session.feed(request + ping + frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\3"))
        wire.sent()

    assert not wire.session.closed


def test_empty_data_frames_end_the_connection() -> None:
    wire = Wire().greeted()
    wire.session.feed(headers_of(1))
    for _ in range(5000):
        wire.session.feed(frame(DATA, 0, 1))

    assert wire.fault == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("part", [b"", b"\x40\x01a\x7f\x81\x07" + b"b" * 1030])
def test_a_header_block_without_end_ends_the_connection(part: bytes) -> None:
    wire = Wire().greeted()
    wire.session.feed(headers_of(1, flags=0))
    for _ in range(100):
        wire.session.feed(frame(CONTINUATION, 0, 1, part))

    assert wire.fault == ErrorCode.ENHANCE_YOUR_CALM


def test_a_small_block_that_stands_for_many_bytes_ends_the_connection() -> None:
    wire = Wire().greeted()
    bomb = b"\x40\x01a\x7f\x81\x1e" + b"b" * 4000 + b"\xbe" * 4000
    wire.session.feed(headers_of(1, block=bomb))

    assert wire.fault == ErrorCode.ENHANCE_YOUR_CALM
    assert not wire.opened


@pytest.mark.parametrize(
    "block", [b"\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x40\x05a", b"\xbf", b"\x3f\xe2\x1f"]
)
def test_a_block_that_cannot_be_decoded_ends_the_connection(block: bytes) -> None:
    wire = Wire().greeted()
    wire.session.feed(headers_of(1, block=block))

    assert wire.fault == ErrorCode.COMPRESSION_ERROR


def test_more_streams_than_allowed_are_refused() -> None:
    wire = Wire(limits=Http2Limits(streams=3)).greeted()
    wire.session.feed(b"".join(headers_of(stream) for stream in (1, 3, 5, 7, 9)))

    assert wire.resets == [(7, ErrorCode.REFUSED_STREAM), (9, ErrorCode.REFUSED_STREAM)]
    assert sorted(wire.session.streams) == [1, 3, 5]


def test_a_client_may_not_send_more_than_the_windows() -> None:
    limits = Http2Limits(stream_window=1000, connection_window=70_000)
    small, large = Wire(limits=limits).greeted(), Wire(limits=limits).greeted()
    small.session.feed(headers_of(1) + frame(DATA, 0, 1, b"x" * 1001))
    large._open = lambda ident, head: Stuck(large, ident)  # type: ignore[method-assign]
    large.session._open_stream = large._open
    for stream in range(1, 600, 2):
        large.session.feed(headers_of(stream) + frame(DATA, 0, stream, b"x" * 900))

    assert small.resets == [(1, ErrorCode.FLOW_CONTROL_ERROR)]
    assert not large.session.closed  # the window of the connection is granted again as it is used


class Stuck(Echo):
    @property
    def wants_more(self) -> bool:
        return False


def test_a_stream_that_takes_no_more_grants_no_window() -> None:
    wire = Wire(limits=Http2Limits(stream_window=1000)).greeted()
    wire.session._open_stream = lambda ident, head: Stuck(wire, ident)
    wire.session.feed(headers_of(1) + frame(DATA, 0, 1, b"x" * 900))

    assert [each for each in frames(wire.sent()) if each[0] == WINDOW_UPDATE] == []


def test_frames_on_a_stream_that_never_was_are_errors() -> None:
    """The first use of stream 7 closes the lower ones; found by comparing with h2."""
    opened = headers_of(7)
    data, ends, padded, priority = (Wire().greeted() for _ in range(4))
    data.session.feed(opened + frame(DATA, 0, 3, b"x"))
    ends.session.feed(opened + headers_of(3, flags=END_HEADERS | END_STREAM, block=TRAILERS))
    padded.session.feed(opened + frame(DATA, PADDED, 3, b"\x05x"))
    priority.session.feed(opened + headers_of(3, flags=END_HEADERS | HAS_PRIORITY, block=b"\0" * 5))

    assert (data.resets, data.fault) == ([(3, ErrorCode.STREAM_CLOSED)], None)
    assert [wire.fault for wire in (ends, padded, priority)] == [ErrorCode.PROTOCOL_ERROR] * 3


def test_frames_that_were_on_the_way_when_a_stream_was_reset_are_ignored() -> None:
    wire = Wire(limits=Http2Limits(streams=1)).greeted()
    wire.session.feed(headers_of(1) + headers_of(3))
    late = frame(DATA, 0, 3, b"x") + headers_of(3, flags=END_HEADERS | END_STREAM, block=TRAILERS)
    wire.session.feed(late)

    assert (wire.resets, wire.fault) == ([(3, ErrorCode.REFUSED_STREAM)], None)


@pytest.mark.parametrize("fields", [[("", "x")], [("Upper", "x")], [(":path", "/")], REQUEST])
def test_malformed_trailers_reset_their_stream(fields: list[tuple[str, str]]) -> None:
    wire = Wire().greeted()
    block = hpack.Encoder().encode(fields)
    wire.session.feed(headers_of(1) + headers_of(1, flags=END_HEADERS | END_STREAM, block=block))

    assert (wire.resets, wire.fault) == ([(1, ErrorCode.PROTOCOL_ERROR)], None)
    assert wire.opened[0].was_lost


def test_trailers_end_a_request() -> None:
    wire = Wire().greeted()
    data = frame(DATA, 0, 1, b"abc")
    wire.session.feed(headers_of(1) + data + headers_of(1, flags=END_HEADERS | END_STREAM, block=TRAILERS))

    assert [body for kind, _, _, body in frames(wire.sent()) if kind == DATA] == [b"abc"]


def test_the_streams_that_a_connection_remembers_are_bounded() -> None:
    wire = Wire(limits=Http2Limits(streams=0)).greeted()
    for stream in range(1, 3001, 2):
        wire.session.feed(headers_of(stream))

    assert len(wire.session._cut) == http2.MAX_CUT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (":path", ""),
        ("Upper", "x"),
        ("connection", "close"),
        ("te", "gzip"),
        (":status", "200"),
        ("x", "a\r\nb"),
        (":path", "/twice"),
        ("grpc-timeout", "1 second"),
        ("grpc-timeout", "123456789S"),
    ],
)
def test_malformed_requests_are_reset(name: str, value: str) -> None:
    fields = [each for each in REQUEST if (name, value) != (":path", "") or each[0] != ":path"]
    wire = Wire().greeted()
    wire.session.feed(headers_of(1, block=hpack.Encoder().encode([*fields, (name, value)])))

    assert wire.resets == [(1, ErrorCode.PROTOCOL_ERROR)]
    assert not wire.opened


def test_messages_of_errors_are_percent_encoded() -> None:
    block = trailers(3, "50 % of\n“x” is ü")

    assert dict(hpack.Decoder().decode(block)) == {
        "grpc-status": "3",
        "grpc-message": "50 %25 of%0A%E2%80%9Cx%E2%80%9D is %C3%BC",
    }
    assert dict(hpack.Decoder().decode(OK)) == {"grpc-status": "0"}
