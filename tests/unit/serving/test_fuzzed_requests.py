"""Random requests by HTTP/1.1, JSON and Protocol Buffers: each gets an answer, and nothing of it is left behind.

Connections are driven without sockets. The short searches run with the other tests, the long ones on request.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import pack
from typing import Any, cast

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from falaj.apps.model_server.grpc.connection import GrpcConnection
from falaj.apps.model_server.grpc.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
)
from falaj.apps.model_server.grpc.headers import literal
from falaj.apps.model_server.http.connection import Connection
from falaj.apps.model_server.server import ModelServer
from model_servers import TOKEN, KnownTokens, constant, deployment
from polling import eventually_async

LONG = {
    "max_examples": 100_000,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
}
SHORT = {**LONG, "max_examples": 150}
STATUSES = {200, 400, 401, 404, 405, 408, 411, 413, 415, 417, 431, 501, 505}
"""What a server may answer to whatever it is sent: no internal error among them."""
CODES = {0, 3, 5, 8, 12}
"""The same for gRPC: OK, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED."""


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.is_closed = self.is_paused = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.out += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str) -> Any:
        return None

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class SocketlessServer:
    """A server whose connections are fed by hand."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self.server = self._loop.run_until_complete(self._start(folder))
        self.answers(Connection, [http_request(body=json.dumps(infer_content()).encode())])

    async def _start(self, folder: Path) -> ModelServer:
        server = ModelServer(KnownTokens())
        await server.apply(deployment(("m", "1", constant(folder / "m.onnx", 1))))
        return server

    def answers(self, kind: Callable[..., Any], pieces: list[bytes]) -> bytes:
        """Return what a new connection writes when it is sent `pieces`."""
        return self._loop.run_until_complete(self._answers(kind, pieces))

    async def _answers(self, kind: Callable[..., Any], pieces: list[bytes]) -> bytes:
        transport = Transport()
        more = (self.server._grpc,) if kind is GrpcConnection else ()
        connection = kind(self.server, *more)
        connection.connection_made(cast(asyncio.Transport, transport))
        try:
            for piece in pieces:
                await eventually_async(lambda: not transport.is_paused or transport.is_closed)
                if transport.is_closed:
                    break
                connection.data_received(piece)
            await eventually_async(lambda: not transport.is_paused or transport.is_closed)
            if kind is Connection and not transport.is_closed:
                connection.eof_received()
            await eventually_async(lambda: not connection.pending or transport.is_closed)
            await asyncio.sleep(0)  # what was answered is written at the end of the turn
        finally:
            connection.connection_lost(None)
        assert not self.server.connections
        assert self.server.metrics.held_bytes == 0
        return bytes(transport.out)

    def close(self) -> None:
        self._loop.run_until_complete(self.server.stop())
        self._loop.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketlessServer]:
    made = SocketlessServer(tmp_path_factory.mktemp("models"))
    yield made
    made.close()


# ------------------------------------------------------------------------------------------ HTTP/1.1


def infer_content(**tensor: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]} | tensor]}


def http_request(*, body: bytes, path: str = "/v2/models/m/infer") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {TOKEN}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


PATHS = [
    *("/v2/models/m/infer", "/v2/models/m/versions/1/infer", "/v2/models/m", "/v2/models/%zz/infer"),
    *("/v2/health/live", "http://test/v2/health/ready", "*", "//", "/predict?endpoint=m", ""),
    *("/v1/models/m:predict", "/v2/repository/index", "/v2/models/stats", "/v2/models/m/infer?x=%00"),
]
BODIES = [
    json.dumps(infer_content()).encode(),
    *(b"", b"{", b"[]", b"null", b"\x1f\x8b\x08\x00", b"5\r\nhello\r\n0\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n"),
]
FIELDS = [
    *(b"Host: test", b"Host: other", b"host:", b"Authorization: Bearer wrong", b"Authorization: Basic x"),
    b"Authorization: Bearer " + TOKEN.encode(),
    *(b"Content-Length: 0", b"Content-Length: -1", b"Content-Length: 1_0", b"Content-Length: 99999999999999"),
    *(b"Content-Length: +3", b"Content-Length: 5, 5", b"Transfer-Encoding: chunked", b"Connection: close"),
    *(b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity", b"TE: trailers", b"X: \x00"),
    *(b"Expect: 100-continue", b"Expect: more", b"Connection: upgrade", b"Upgrade: h2c", b" folded", b":"),
    *(b"Content-Encoding: gzip", b"Content-Encoding: br", b"Accept-Encoding: gzip", b"Origin: http://x"),
    *(b"Inference-Header-Content-Length: 3", b"Inference-Header-Content-Length: x", b"Falaj-Version: 9"),
    *(b"Falaj-Key: \xff", b"Traceparent: 00-x", b"X" * 300 + b": y", b"Content-Type: text/csv"),
]


@st.composite
def http_requests(draw: st.DrawFn) -> bytes:
    """Return requests, most of them nearly right, some with bytes that were changed afterwards."""
    body = draw(st.sampled_from(BODIES))
    method, version = draw(st.sampled_from(["POST"] * 6 + ["GET", "PUT", "post", ""])), "HTTP/1.1"
    if draw(st.integers(0, 9)) == 0:
        version = draw(st.sampled_from(["HTTP/1.0", "HTTP/2.0", "http/1.1", "", "HTTP/1.1 "]))
    lines = [f"{method} {draw(st.sampled_from(PATHS))} {version}".encode()]
    if draw(st.integers(0, 9)):
        lines += [
            b"Host: test",
            b"Authorization: Bearer " + TOKEN.encode(),
            b"Content-Length: %d" % len(body),
        ]
    lines += draw(st.lists(st.sampled_from(FIELDS), max_size=3))
    end = draw(st.sampled_from([b"\r\n"] * 8 + [b"\n", b"\r"]))
    made = bytearray(end.join([*lines, b"", b""]) + body)
    for at, byte in draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=2)):
        if made and draw(st.booleans()):
            made[at % len(made)] = byte
    return bytes(made)


def read_responses(data: bytes) -> list[tuple[int, bytes]]:
    """Return status and body of each response; fail if they are not what HTTP/1.1 allows."""
    found = []
    while data:
        head, end, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        status = re.fullmatch(rb"HTTP/1\.1 ([0-9]{3}) [ -~]+", first)
        assert status is not None, data[:200]
        assert end == b"\r\n\r\n", data[:200]
        assert all(re.fullmatch(rb"[A-Za-z0-9-]+: [ -~]*", line) for line in lines), head
        if status[1] == b"100":
            data = rest
            continue
        sizes = [int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")]
        assert len(sizes) == 1, head
        assert len(rest) >= sizes[0], head
        found.append((int(status[1]), rest[: sizes[0]]))
        if b"Content-Type: application/json" in lines and b"Content-Encoding: gzip" not in lines:
            json.loads(found[-1][1])
        data = rest[sizes[0] :]
    return found


def check_http(server: SocketlessServer, requests: list[bytes], size: int) -> None:
    sent = b"".join(requests)

    together = read_responses(server.answers(Connection, [sent]))
    apart = read_responses(
        server.answers(Connection, [sent[at : at + size] for at in range(0, len(sent), size)])
    )

    assert {status for status, _ in together} <= STATUSES
    assert [accepted(each) for each in together] == [accepted(each) for each in apart]


def accepted(response: tuple[int, bytes]) -> bytes | None:
    """Return the body of an answer; None for a refusal: which of several faults it names may depend on the cuts."""
    return response[1] if response[0] == 200 else None


http = (st.lists(http_requests(), min_size=1, max_size=3), st.integers(1, 200))


def test_any_bytes_of_http_get_the_same_answers_however_they_are_cut(server: SocketlessServer) -> None:
    settings(**SHORT)(given(*http)(lambda requests, size: check_http(server, requests, size)))()


@pytest.mark.on_request("FALAJ_FUZZ")
@pytest.mark.timeout(7200)
def test_any_bytes_of_http_get_the_same_answers_however_they_are_cut_for_long(
    server: SocketlessServer,
) -> None:
    settings(**LONG)(given(*http)(lambda requests, size: check_http(server, requests, size)))()


# ---------------------------------------------------------------------------------------------- JSON

numbers = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([0, 1, 2, -1, 1e39, 2**31]))
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5), st.sampled_from(["FP32", "x", "NaN"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
tensors = st.fixed_dictionaries(
    {},
    optional={
        "name": st.one_of(st.sampled_from(["x", "y", ""]), anything),
        "shape": st.one_of(st.lists(st.integers(-2, 2**40), max_size=4), st.just([1, 2]), anything),
        "datatype": st.one_of(st.sampled_from(["FP32", "FP64", "BYTES", "BOOL", "BF16", "FP99"]), anything),
        "data": st.one_of(st.lists(numbers, max_size=4), anything),
        "parameters": st.one_of(
            st.dictionaries(
                st.sampled_from(["binary_data_size", "classification", "a"]), anything, max_size=2
            ),
            anything,
        ),
    },
)
contents = st.one_of(
    st.builds(infer_content, data=st.one_of(st.lists(numbers, min_size=2, max_size=2), anything)),
    st.fixed_dictionaries(
        {"inputs": st.one_of(st.lists(tensors, max_size=3), anything)},
        optional={
            "id": anything,
            "outputs": st.one_of(st.lists(tensors, max_size=2), anything),
            "parameters": st.one_of(
                st.dictionaries(
                    st.sampled_from(["priority", "timeout", "falaj_logged"]), anything, max_size=2
                ),
                anything,
            ),
        },
    ),
    anything,
)
texts = st.tuples(contents, st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=1))


def check_json(server: SocketlessServer, content: Any, changes: list[tuple[int, int]]) -> None:
    body = bytearray(json.dumps(content).encode())
    for at, byte in changes:
        body[at % len(body)] = byte

    ((status, answer),) = read_responses(server.answers(Connection, [http_request(body=bytes(body))]))

    assert status in STATUSES | {504}, (body, answer)  # 504: a deadline that the request itself sets
    found = json.loads(answer)
    assert ("outputs" in found) is (status == 200)
    assert status == 200 or (isinstance(found["error"], str) and found["error"])
    for output in found.get("outputs", ()):
        assert len(output["data"]) == output["shape"][0]


def test_any_json_gets_an_answer(server: SocketlessServer) -> None:
    settings(**SHORT)(given(texts)(lambda text: check_json(server, *text)))()


@pytest.mark.on_request("FALAJ_FUZZ")
@pytest.mark.timeout(7200)
def test_any_json_gets_an_answer_for_long(server: SocketlessServer) -> None:
    settings(**LONG)(given(texts)(lambda text: check_json(server, *text)))()


# ---------------------------------------------------------------------------------- Protocol Buffers

METHODS = ["ModelInfer"] * 5 + [
    "ModelReady",
    "ModelStatistics",
    "RepositoryModelLoad",
    "ModelConfig",
    "Nothing",
]


@st.composite
def infer_messages(draw: st.DrawFn) -> bytes:
    """Return messages for inference, most of them nearly right, some with bytes that were changed afterwards."""
    message = service_pb2.ModelInferRequest(model_name=draw(st.sampled_from(["m"] * 5 + ["", "n", "m\0"])))
    message.model_version = draw(st.sampled_from(["", "", "1", "2", "é"]))
    for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2]))):
        tensor = message.inputs.add(name=draw(st.sampled_from(["x", "x", "y", ""])))
        tensor.datatype = draw(st.sampled_from(["FP32"] * 4 + ["BYTES", "BF16", "FP99", ""]))
        tensor.shape.extend(
            draw(st.sampled_from([[1, 2]] * 4 + [[], [0, 2], [-1, -2], [2**62, 4], [1] * 40]))
        )
        if draw(st.integers(0, 4)) == 0:
            tensor.contents.fp32_contents.extend([1.0, 2.0])
        else:
            message.raw_input_contents.append(
                draw(st.sampled_from([b"\0" * 8] * 4 + [b"", b"odd", b"\xff" * 8]))
            )
    if draw(st.booleans()):
        message.parameters[draw(st.sampled_from(["timeout", "priority", "falaj_logged"]))].int64_param = draw(
            st.integers(-5, 10**9)
        )
    made = bytearray(message.SerializeToString())
    for at, byte in draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=2)):
        if made:
            made[at % len(made)] = byte
    return bytes(made[: draw(st.sampled_from([None, None, None, 7, 30]))])


def grpc_request(stream: int, method: str, message: bytes) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/inference.GRPCInferenceService/{method}",
        "content-type": "application/grpc",
        "authorization": f"Bearer {TOKEN}",
    }
    block = b"".join(literal(name.encode(), value.encode()) for name, value in fields.items())
    data = pack(">BL", 0, len(message)) + message
    return frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, data)


def check_messages(server: SocketlessServer, calls: list[tuple[str, bytes]]) -> None:
    sent = PREFACE + frame(SETTINGS, 0, 0)
    sent += b"".join(grpc_request(2 * number + 1, *call) for number, call in enumerate(calls))

    answer = server.answers(GrpcConnection, [sent])

    codes = [int(code) for code in re.findall(rb"grpc-status.([0-9]+)", answer)]
    assert len(codes) == len(calls)
    assert set(codes) <= CODES | {4}, calls  # 4: a deadline that the request itself sets
    for method, message in calls:
        if method == "ModelInfer" and not is_message(message):
            assert 3 in codes


def is_message(data: bytes) -> bool:
    try:
        service_pb2.ModelInferRequest.FromString(data)
    except DecodeError:
        return False
    return True


calls = st.lists(st.tuples(st.sampled_from(METHODS), infer_messages()), min_size=1, max_size=4)


def test_any_message_gets_a_status(server: SocketlessServer) -> None:
    settings(**SHORT)(given(calls)(lambda made: check_messages(server, made)))()


@pytest.mark.on_request("FALAJ_FUZZ")
@pytest.mark.timeout(7200)
def test_any_message_gets_a_status_for_long(server: SocketlessServer) -> None:
    settings(**LONG)(given(calls)(lambda made: check_messages(server, made)))()
