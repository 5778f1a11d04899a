"""Calls of gRPC as its users expect them: deadlines, cancellation, health, reflection, TLS; and bad clients."""

from __future__ import annotations

import gzip
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from certificates import make_certificate
from falaj.apps.model_server.grpc.frames import PING, PREFACE, frame
from falaj.apps.model_server.grpc.messages import POOL
from falaj.apps.model_server.limits import ServerLimits
from falaj.records.control.tls import Tls
from falaj.serving.runtime.rate_limits import RateLimit
from model_servers import (
    OTHER_TOKEN,
    TOKEN,
    RunningServer,
    constant,
    deployment,
    mlp,
    serving,
    tabular,
    widened,
)
from polling import PATIENCE_S, eventually

METADATA = (("authorization", f"Bearer {TOKEN}"),)
LIMITS = ServerLimits(
    body_bytes=200_000,
    held_bytes=2_000_000,
    connections=50,
    pipelined=8,
    head_s=0.4,
    body_s=0.6,
    idle_s=30,
    stop_s=5,
    sweep_s=0.05,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    constant(folder / "m.onnx", 1)
    mlp(folder / "heavy.onnx", widths=(2, 3000, 3000, 1))
    widened(folder / "wide.onnx", 30_000)
    tabular(folder / "t.onnx")
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[RunningServer]:
    wanted = deployment(
        ("m", "1", models / "m.onnx"),
        ("heavy", "1", models / "heavy.onnx"),
        ("wide", "1", models / "wide.onnx"),
        ("scores", "1", models / "t.onnx"),
        ("forbidden", "1", models / "m.onnx"),
    )
    with serving(wanted, limits=LIMITS) as running:
        yield running


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as made:
        yield made


@pytest.fixture
def stub(channel: grpc.Channel) -> service_pb2_grpc.GRPCInferenceServiceStub:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture(autouse=True)
def nothing_is_left(server: RunningServer) -> Iterator[None]:
    """Check after each test that the server holds no connection and no byte, and still answers."""
    yield
    eventually(lambda: not server.server.connections)
    assert server.server.metrics.held_bytes == 0
    with RawClient(server.grpc_port) as client:
        assert client.infer() == (0, "")
    eventually(lambda: not server.server.connections)


def infer_request(model: str = "m", rows: int = 1, **more: Any) -> Any:
    made = service_pb2.ModelInferRequest(model_name=model, **more)
    tensor = made.inputs.add(name="x", datatype="FP32", shape=[rows, 1 if model == "wide" else 2])
    made.raw_input_contents.append(np.ones(tensor.shape, np.float32).tobytes())
    return made


class RawClient:
    """A client on a socket, by h2 or by frames of its own, that can do what no good client does."""

    def __init__(self, port: int, *, greets: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        if greets:
            self.h2.initiate_connection()
            self.flush()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def open(self, method: str = "ModelInfer", *, token: str | None = TOKEN, **headers: str) -> int:
        stream = self.h2.get_next_available_stream_id()
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method if method.startswith("/") else f"/inference.GRPCInferenceService/{method}",
            ":authority": "test",
            "te": "trailers",
            "content-type": "application/grpc",
            **({"authorization": f"Bearer {token}"} if token else {}),
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        self.h2.send_headers(stream, list(fields.items()))
        self.flush()
        return stream

    def send(self, stream: int, data: bytes, *, ends: bool = True) -> None:
        self.h2.send_data(stream, data, end_stream=ends)
        self.flush()

    def status(self, stream: int) -> tuple[int, str]:
        """Return the status and message of a call; -1 if the stream or the connection was ended without one."""
        while data := self._receive():
            for event in self.h2.receive_data(data):
                found = dict(getattr(event, "headers", None) or ())
                if getattr(event, "stream_id", None) == stream and "grpc-status" in found:
                    return int(found["grpc-status"]), found.get("grpc-message", "")
                if isinstance(event, h2.events.StreamReset) and event.stream_id == stream:
                    return -1, f"reset {event.error_code}"
                if isinstance(event, h2.events.ConnectionTerminated):
                    return -1, f"goaway {event.error_code}"
                if isinstance(event, h2.events.DataReceived):
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self.flush()
        return -1, "closed"

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(65536)
        except ConnectionError:
            return b""

    def infer(self, message: bytes | None = None, **headers: str) -> tuple[int, str]:
        data = infer_request().SerializeToString() if message is None else message
        stream = self.open(**headers)
        self.send(stream, prefixed(data))
        return self.status(stream)


def prefixed(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BL", flag, len(message)) + message


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    with RawClient(server.grpc_port) as made:
        yield made


# ---------------------------------------------------------------------------------------- semantics


def test_typed_contents_of_every_kind_are_read(stub: Any) -> None:
    request = service_pb2.ModelInferRequest(model_name="scores")
    amount = request.inputs.add(name="amount", datatype="FP64", shape=[2])
    amount.contents.fp64_contents.extend([1.0, 4.0])
    category = request.inputs.add(name="category", datatype="INT64", shape=[2])
    category.contents.int64_contents.extend([0, 4])

    answer = stub.ModelInfer(request, metadata=METADATA)

    assert np.frombuffer(answer.raw_output_contents[0]).tolist() == [2.0, 12.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.raw_input_contents.append(b""), "raw_input_contents: given 2, allowed none or one"),
        (lambda r: r.raw_input_contents.__setitem__(0, b"abc"), "3 bytes, where the shape needs 8"),
        (lambda r: r.inputs[0].contents.fp32_contents.append(1), "contents and raw_input_contents"),
        (lambda r: r.inputs[0].shape.extend([1] * 40), "more than 32 dimensions"),
        (lambda r: r.inputs[0].shape.__setitem__(0, -1), r"given shape \[-1, 2\]"),
        (lambda r: r.inputs[0].shape.__setitem__(0, 2**62), r"given shape|where the shape needs"),
        (lambda r: setattr(r, "id", "x" * 300), "id: given 300 characters"),
        (lambda r: setattr(r.inputs[0], "datatype", "FP99"), "given datatype FP99"),
        (lambda r: r.inputs.pop(), "raw_input_contents: given 1, allowed none"),
        (lambda r: r.inputs[0].parameters["shared_memory_region"].SetInParent(), "shared_memory_region"),
        (lambda r: [r.parameters[f"p{n}"].SetInParent() for n in range(70)], "parameters: given 70"),
    ],
)
def test_wrong_tensors_are_refused_with_the_reason(stub: Any, change: Any, words: str) -> None:
    request = infer_request()
    change(request)

    with pytest.raises(grpc.RpcError, match=words) as caught:
        stub.ModelInfer(request, metadata=METADATA)

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60), st.integers(0, 120), st.integers(0, 255))
def test_messages_that_lie_get_a_status(client: RawClient, data: bytes, at: int, byte: int) -> None:
    """A message with wrong bytes is refused or answered; it never ends the connection."""
    valid = bytearray(infer_request().SerializeToString())
    valid[at % len(valid)] = byte
    for message in (data, bytes(valid), bytes(valid) + data):
        assert client.infer(message)[0] in (0, 3, 5)


def test_a_call_whose_deadline_passes_is_not_run(server: RunningServer, stub: Any) -> None:
    batches = lambda: server.server.metrics.served["heavy"].queues["1"].batches  # noqa: E731
    before = batches()
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(infer_request("heavy", rows=2000), metadata=METADATA, timeout=0.0005)

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert batches() - before <= 1


def test_the_server_enforces_deadlines_itself(client: RawClient) -> None:
    stream = client.open(grpc_timeout="50m")  # and then nothing

    code, words = client.status(stream)

    assert code == 4
    assert "the deadline has passed" in words


def test_a_cancelled_call_is_dropped_from_the_queue(server: RunningServer, stub: Any) -> None:
    calls = [stub.ModelInfer.future(infer_request("heavy", rows=20), metadata=METADATA) for _ in range(6)]
    for call in calls[2:]:
        call.cancel()

    answers = [call.result(timeout=PATIENCE_S) for call in calls[:2]]

    assert all(answer.model_name == "heavy" for answer in answers)
    assert all(call.cancelled() for call in calls[2:])
    eventually(lambda: server.server.metrics.held_bytes == 0)


def test_health_of_the_server_and_of_models(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    ask = health_pb2.HealthCheckRequest

    assert health.Check(ask()).status == 1
    assert health.Check(ask(service="inference.GRPCInferenceService")).status == 1
    assert health.Check(ask(service="m"), metadata=METADATA).status == 1
    with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
        health.Check(ask(service="m"))
    with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
        health.Check(ask(service="forbidden"), metadata=METADATA)
    with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
        health.Check(ask(service="nothing"), metadata=METADATA)


def test_watchers_of_health_are_told_of_changes(models: Path) -> None:
    with serving(None) as running, grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        states = [next(watch).status]
        running.apply(deployment(("m", "1", models / "m.onnx")))
        states.append(next(watch).status)
        stopping = threading.Thread(target=running.stop)
        stopping.start()
        states.append(next(watch).status)
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            next(watch)
        stopping.join(PATIENCE_S)

    assert states == [2, 1, 2]


def test_reflection_tells_services_and_messages(server: RunningServer) -> None:
    address = f"127.0.0.1:{server.grpc_port}"
    with grpc.insecure_channel(address) as plain:
        channel = grpc.intercept_channel(plain, WithToken())
        database = ProtoReflectionDescriptorDatabase(channel)
        services = database.get_services()
        pool = DescriptorPool(database)
        found = pool.FindServiceByName("inference.GRPCInferenceService")

    assert set(services) == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    }
    assert found.methods_by_name["ModelInfer"].input_type.fields_by_name["raw_input_contents"].number == 7


class WithToken(grpc.StreamStreamClientInterceptor):
    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=METADATA), requests)


def test_messages_have_the_numbers_of_the_protocol() -> None:
    """Every field that we declare is that of the stock client."""
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    pairs = [
        (getattr(method, kind), getattr(theirs[method.name], kind))
        for method in POOL.FindServiceByName("inference.GRPCInferenceService").methods
        for kind in ("input_type", "output_type")
    ]
    seen = set()
    while pairs:
        ours, other = pairs.pop()
        if ours.full_name in seen:
            continue
        seen.add(ours.full_name)
        for field in ours.fields:
            same = other.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (same.number, same.type, same.is_repeated)
            if field.message_type is not None:
                pairs.append((field.message_type, same.message_type))
    assert len(seen) > 40


def test_calls_over_tls(models: Path, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    tls = Tls(certificate=certificate.pem, key=certificate.key)
    with serving(deployment(("m", "1", models / "m.onnx")), tls=tls) as running:
        address = f"127.0.0.1:{running.grpc_port}"
        trust = grpc.ssl_channel_credentials(Path(certificate.pem).read_bytes())
        with grpc.secure_channel(address, trust) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answers = [stub.ModelInfer(infer_request(), metadata=METADATA) for _ in range(5)]
        context = ssl.create_default_context(cafile=certificate.pem)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", running.grpc_port)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
        ):
            chosen = wrapped.selected_alpn_protocol()

    assert [answer.model_name for answer in answers] == ["m"] * 5
    assert chosen == "h2"


def test_a_stopping_server_answers_open_calls(models: Path) -> None:
    wanted = deployment(("heavy", "1", models / "heavy.onnx"))
    with serving(wanted) as running, grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(infer_request("heavy"), metadata=METADATA)
        request = infer_request("heavy", rows=500)
        calls = [stub.ModelInfer.future(request, metadata=METADATA) for _ in range(4)]
        eventually(lambda: running.server.metrics.held_bytes > 0 or all(call.done() for call in calls))
        running.stop()

        codes = {call.code() for call in calls}

    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    assert grpc.StatusCode.OK in codes


def test_a_caller_over_its_rate_is_told_when_to_come_back(models: Path) -> None:
    limits = ServerLimits(rate=RateLimit(0.5, 2))
    wanted = deployment(("m", "1", models / "m.onnx"))
    with serving(wanted, limits=limits) as running, RawClient(running.grpc_port) as client:
        codes = [client.infer()[0] for _ in range(4)]
        other = client.infer(token=OTHER_TOKEN)[0]

    assert (codes, other) == ([0, 0, 8, 8], 0)


# --------------------------------------------------------------------------------------- bad clients


def test_http_1_is_told_where_rest_is(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.grpc_port), timeout=PATIENCE_S) as client:
        client.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))

    assert b"REST is on serving.port" in answer


@pytest.mark.parametrize(
    ("fields", "status"), [({":method": "GET"}, "405"), ({"content-type": "application/json"}, "415")]
)
def test_requests_that_are_not_of_grpc(client: RawClient, fields: dict[str, str], status: str) -> None:
    head = {":method": "POST", ":scheme": "http", ":path": "/", ":authority": "x", **fields}
    client.h2.send_headers(1, list(head.items()), end_stream=True)
    client.flush()
    found: list[str] = []
    while not found:
        events = client.h2.receive_data(client.socket.recv(65536))
        found = [
            dict(event.headers)[":status"]
            for event in events
            if isinstance(event, h2.events.ResponseReceived)
        ]

    assert found == [status]


def test_two_tokens_and_wrong_tokens_are_refused(client: RawClient) -> None:
    stream = client.h2.get_next_available_stream_id()
    head = [(":method", "POST"), (":scheme", "http"), (":path", "/inference.GRPCInferenceService/ModelInfer")]
    tokens = [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {OTHER_TOKEN}")]
    more = [(":authority", "test"), ("content-type", "application/grpc")]
    client.h2.send_headers(stream, [*head, *more, *tokens])
    client.flush()

    assert client.status(stream)[0] == 3
    assert [client.infer(token=token)[0] for token in ("wrong", TOKEN, "other", OTHER_TOKEN)] == [
        16,
        0,
        16,
        0,
    ]


def test_who_guesses_tokens_loses_the_connection(client: RawClient) -> None:
    codes = []
    with suppress(h2.exceptions.ProtocolError, OSError):  # once the connection has ended
        while len(codes) < 60:
            codes.append(client.infer(token=f"guess-{len(codes)}")[0])

    assert codes[:5] == [16] * 5
    assert len(codes) < 40


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", 3),
        (b"\0\0", 3),
        (prefixed(b"abc")[:-1], 3),
        (prefixed(b"") + prefixed(b""), 3),
        (b"\0\xff\xff\xff\xff", 3),
        (prefixed(b"x" * 60_000) * 4, 3),
        (prefixed(b"abc", 2), 12),
        (prefixed(gzip.compress(b"abc", mtime=0), 1), 12),
    ],
)
def test_requests_that_are_not_one_message(client: RawClient, data: bytes, code: int) -> None:
    stream = client.open()
    for at in range(0, len(data), 16_000):
        try:
            client.send(stream, data[at : at + 16_000], ends=at + 16_000 >= len(data))
        except h2.exceptions.ProtocolError:
            break
    if not data:
        client.send(stream, b"")

    assert client.status(stream)[0] == code


def test_a_message_that_announces_too_much_is_refused_at_once(client: RawClient) -> None:
    stream = client.open()
    client.send(stream, b"\0\xff\xff\xff\xff", ends=False)

    assert client.status(stream) == (8, "the message exceeds the limit of 200000 bytes")


def test_a_compressed_bomb_is_refused(client: RawClient) -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    stream = client.open(grpc_encoding="gzip")
    client.send(stream, prefixed(bomb, 1)[:16_000], ends=False)
    client.send(stream, prefixed(bomb, 1)[16_000:32_000], ends=False)
    client.send(stream, prefixed(bomb, 1)[32_000:48_000], ends=False)
    client.send(stream, prefixed(bomb, 1)[48_000:])

    code, words = client.status(stream)

    assert (code, words) == (8, "the message exceeds the limit of 200000 bytes")


def test_a_request_may_come_byte_by_byte(client: RawClient) -> None:
    stream = client.open()
    data = prefixed(infer_request().SerializeToString())
    for at in range(len(data)):
        client.send(stream, data[at : at + 1], ends=at == len(data) - 1)

    assert client.status(stream)[0] == 0


def test_a_request_that_does_not_end_is_cancelled(client: RawClient) -> None:
    stream = client.open()
    client.send(stream, b"\0\0", ends=False)

    code, words = client.status(stream)

    assert (code, words) == (1, "the request did not arrive in time")


@pytest.mark.parametrize("data", [b"", PREFACE[:10], PREFACE, PREFACE + b"\0\0"])
def test_a_client_that_never_greets_is_cut_off(server: RunningServer, data: bytes) -> None:
    with RawClient(server.grpc_port, greets=False) as client:
        client.socket.sendall(data)
        while client._receive():
            pass


def test_a_frame_that_does_not_end_ends_the_connection(client: RawClient) -> None:
    client.socket.sendall(frame(PING, 0, 0, b"12345678")[:12])

    assert client.status(1)[1] in ("goaway 11", "closed")


def test_vanishing_clients_leave_nothing(server: RunningServer) -> None:
    for _ in range(10):
        with RawClient(server.grpc_port) as client:
            stream = client.open()
            client.send(stream, b"\0\0\0\1\0abc", ends=False)
            client.send(client.open(), prefixed(infer_request("heavy", rows=100).SerializeToString()))
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_client_that_reads_nothing_is_cut_off(server: RunningServer) -> None:
    """Its answers wait for a window that it never opens; they count as held, and go after a while."""
    with RawClient(server.grpc_port) as client:
        for _ in range(4):
            client.send(client.open(), prefixed(infer_request("wide").SerializeToString()))
        eventually(lambda: server.server.metrics.held_bytes > 100_000)
        eventually(lambda: not server.server.connections)


def test_large_answers_arrive_through_small_windows(client: RawClient) -> None:
    streams = [client.open() for _ in range(3)]
    for stream in streams:
        client.send(stream, prefixed(infer_request("wide").SerializeToString()))

    assert client.status(streams[-1])[0] == 0


@contextmanager
def silent_connections(port: int, count: int) -> Iterator[None]:
    made = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    try:
        yield
    finally:
        for each in made:
            each.close()


def test_connections_of_strangers_keep_nobody_out(server: RunningServer) -> None:
    with silent_connections(server.grpc_port, 80), RawClient(server.grpc_port) as client:
        assert client.infer() == (0, "")
