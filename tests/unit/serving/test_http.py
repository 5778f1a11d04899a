"""HTTP at the socket level: pipelining, chunks, half-closed and malicious connections, overload, shutdown."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from falaj.apps.model_server.limits import ServerLimits
from model_servers import RawClient, RunningServer, constant, deployment, mlp, request, serving
from polling import eventually

BODY = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'
INFER = request(body=BODY)
LIMITS = ServerLimits(
    head_bytes=4096,
    body_bytes=100_000,
    held_bytes=300_000,
    connections=50,
    pipelined=8,
    head_s=0.4,
    body_s=0.6,
    idle_s=30,
    linger_s=0.3,
    stop_s=5,
    sweep_s=0.05,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    constant(folder / "m.onnx", 1)
    mlp(folder / "heavy.onnx", widths=(2, 2000, 2000, 1))
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[RunningServer]:
    with serving(deployment(("m", "1", models / "m.onnx")), limits=LIMITS) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    with RawClient(server.port) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(server: RunningServer) -> Iterator[None]:
    """After each test the server holds no connection and no byte, and still answers."""
    yield
    eventually(lambda: not server.server.connections)
    assert server.server.metrics.held_bytes == 0
    with RawClient(server.port) as client:
        assert client.ask(INFER)[0] == 200
    eventually(lambda: not server.server.connections)


# ------------------------------------------------------------------------------------------ good manners


def test_a_connection_is_kept(client: RawClient) -> None:
    assert [client.ask(INFER)[0] for _ in range(5)] == [200] * 5


def test_pipelined_requests_are_answered_in_order(client: RawClient) -> None:
    paths = ["/v2/health/live", "/v2/models/m", "/nothing", "/v2/health/ready"]
    everything = b"".join(INFER + request("GET", path) for path in paths * 10)

    sender = threading.Thread(target=client.send, args=(everything,))
    sender.start()
    statuses = [client.answer()[0] for _ in range(80)]
    sender.join()

    assert statuses == [200, 200, 200, 200, 200, 404, 200, 200] * 10


def test_a_request_may_come_byte_by_byte(client: RawClient) -> None:
    for byte in INFER:
        client.send(bytes([byte]))

    assert client.answer()[0] == 200


def test_a_body_may_come_in_chunks(client: RawClient) -> None:
    client.send(request(Transfer_Encoding="chunked"))
    for start in range(0, len(BODY), 7):
        part = BODY[start : start + 7]
        client.send(b"%x\r\n%b\r\n" % (len(part), part))
    client.send(b"0\r\n\r\n")

    assert client.answer()[0] == 200


def test_a_client_that_waits_is_told_to_go_on(client: RawClient) -> None:
    head = request(body=b"", Expect="100-continue", Content_Length=str(len(BODY)))

    client.send(INFER + head)
    first = client.answer()[0]
    invited = (client.line(), client.line())
    client.send(BODY)

    assert first == 200
    assert invited == (b"HTTP/1.1 100 Continue\r\n", b"\r\n")
    assert client.answer()[0] == 200


def test_a_half_closed_connection_gets_its_answers(client: RawClient) -> None:
    client.send(INFER + INFER)
    client.socket.shutdown(socket.SHUT_WR)

    assert [client.answer()[0], client.answer()[0]] == [200, 200]
    assert client.is_closed


def test_who_asks_for_it_is_closed(client: RawClient) -> None:
    status, headers, _ = client.ask(request(body=BODY, Connection="close"))

    assert (status, headers["connection"]) == (200, "close")
    assert client.is_closed


def test_http_1_0_is_answered_and_closed(client: RawClient) -> None:
    assert client.ask(INFER.replace(b"HTTP/1.1", b"HTTP/1.0"))[0] == 200
    assert client.is_closed


def test_head_has_no_body(client: RawClient) -> None:
    client.send(request("HEAD", "/v2/health/live") + INFER)

    assert client.line() == b"HTTP/1.1 200 OK\r\n"
    while client.line().strip():
        pass
    assert client.answer()[0] == 200


def test_an_offer_to_upgrade_is_ignored(client: RawClient) -> None:
    upgrade = request(body=BODY, Connection="Upgrade, HTTP2-Settings", Upgrade="h2c", HTTP2_Settings="AA")

    assert client.ask(upgrade)[0] == 200
    assert client.ask(INFER)[0] == 200


# ---------------------------------------------------------------------------------------------- hostile


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01", 400),
        (request(body=BODY, X_Long="a" * 5000), 431),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 600_000, 431),
        (request(body=b"", Content_Length="100001"), 413),
        (request(body=b"", Content_Length="100001", Expect="100-continue"), 413),
        (request(body=b" " * 100_001, Content_Length="100001"), 413),
        (request(Transfer_Encoding="chunked") + b"186a1\r\n" + b" " * 100_001, 413),
        (request(body=BODY, Transfer_Encoding="chunked", Content_Length="70"), 400),
        (request(body=BODY, token=None), 401),
        (request("GET", "/metrics", token=None), 401),
        (request("GET", "/v2", token=None), 401),
        (request("GET", "/nothing", token="wrong"), 401),
        (request(body=BODY, Content_Encoding="gzip"), 415),
        (request(body=BODY, authorization="Bearer other"), 400),
    ],
)
def test_what_cannot_be_taken_is_refused_in_words(client: RawClient, data: bytes, status: int) -> None:
    found, headers, body = client.ask(data)

    assert found == status, body
    assert json.loads(body)["error"]
    if status != 401 or b"wrong" not in data:
        assert headers["connection"] == "close"
        assert client.is_closed


def test_a_head_that_never_ends_is_cut_off(client: RawClient) -> None:
    client.send(b"GET /v2 HTTP/1.1\r\nHost: slow\r\n")

    assert client.answer()[0] == 408
    assert client.is_closed


def test_a_body_that_never_comes_is_cut_off(client: RawClient) -> None:
    client.send(request(body=b"{", Content_Length="50"))

    assert client.answer()[0] == 408


def test_a_client_that_reads_nothing_is_cut_off(server: RunningServer) -> None:
    with RawClient(server.port) as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.socket.settimeout(3)
        with pytest.raises((ConnectionError, TimeoutError)):
            client.send(request("GET", "/metrics") * 400_000)


def test_killed_clients_leave_nothing_behind(server: RunningServer) -> None:
    for cut in range(1, len(INFER), 17):
        client = RawClient(server.port)
        client.send(INFER * 3 + INFER[:cut])
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        client.__exit__()


def test_too_many_connections_are_refused(server: RunningServer) -> None:
    crowd = [RawClient(server.port) for _ in range(50)]
    try:
        eventually(lambda: len(server.server.connections) == 50)

        with RawClient(server.port) as late:
            assert late.answer()[0] == 503
        assert crowd[0].ask(INFER)[0] == 200
    finally:
        for client in crowd:
            client.__exit__()


def test_bytes_held_for_all_are_limited(server: RunningServer) -> None:
    crowd = [RawClient(server.port) for _ in range(5)]
    try:
        for client in crowd:
            client.send(request(body=b" " * 90_000, Content_Length="95000"))

        statuses = sorted(client.answer()[0] for client in crowd)

        assert 503 in statuses
        assert set(statuses) <= {503, 408}
    finally:
        for client in crowd:
            client.__exit__()


# ------------------------------------------------------------------------------------ overload, stopping


def test_more_work_than_can_be_done_is_refused_not_queued(models: Path) -> None:
    limits = ServerLimits(waiting=2, threads=1)
    with serving(deployment(("m", "1", models / "heavy.onnx")), limits=limits) as busy:
        queue = busy.server._deployment_state.served["m"].queues["1"]
        assert not queue.engine.cost.inline
        with RawClient(busy.port) as client:
            client.send(INFER * 12 + request("GET", "/v2/health/live"))
            answers = [client.answer() for _ in range(13)]

    statuses = [status for status, _, _ in answers]
    assert statuses.count(200) >= 2
    assert 503 in statuses
    assert all(headers["retry-after"] == "1" for status, headers, _ in answers if status == 503)
    assert statuses[-1] == 200


def test_a_server_that_stops_answers_what_was_asked(models: Path) -> None:
    with serving(deployment(("m", "1", models / "heavy.onnx"))) as stopping:
        with RawClient(stopping.port) as client, RawClient(stopping.port) as idle:
            assert idle.ask(INFER)[0] == 200
            rows = (
                b'{"inputs":[{"name":"x","shape":[500,2],"datatype":"FP32","data":%b}]}'
                % str([0] * 1000).encode()
            )
            client.send(request(body=rows) * 5)
            eventually(lambda: stopping.server.metrics.held_bytes >= 3 * len(rows), every=0.001)

            stopping.stop()

            answers = [client.answer() for _ in range(5)]
            assert [status for status, _, _ in answers] == [200] * 5
            assert answers[-1][1]["connection"] == "close"
            assert client.is_closed
            assert idle.is_closed
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the system likes
            RawClient(stopping.port)
