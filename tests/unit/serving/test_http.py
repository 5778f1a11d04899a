"""HTTP at the socket level: pipelining, chunks, half-closed and malicious connections, overload, shutdown."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from falaj.apps.model_server.limits import ServerLimits
from model_servers import (
    OTHER_TOKEN,
    KnownTokens,
    RawClient,
    RunningServer,
    constant,
    deployment,
    mlp,
    request,
    serving,
    widened,
)
from polling import eventually, let_pass

BODY = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'
ONE = b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[1]}]}'
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
    """Check after each test that the server holds no connection and no byte, and still answers."""
    yield
    eventually(lambda: not server.server.connections)
    assert server.server.metrics.held_bytes == 0
    with RawClient(server.port) as client:
        assert client.ask(INFER)[0] == 200
    eventually(lambda: not server.server.connections)


# ---------------------------------------------------------------------------------------- valid requests


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


def test_expect_continue_is_answered(client: RawClient) -> None:
    head = request(body=b"", Expect="100-continue", Content_Length=str(len(BODY)))

    client.send(INFER + head)
    first = client.answer()[0]
    invited = (client.line(), client.line())
    client.send(BODY)

    assert first == 200
    assert invited == (b"HTTP/1.1 100 Continue\r\n", b"\r\n")
    assert client.answer()[0] == 200


@pytest.mark.parametrize("target", ["http://test/v2/models/m", "HTTPS://other:8443/v2/models/m?x=1"])
def test_an_absolute_target_means_its_path(client: RawClient, target: str) -> None:
    assert client.ask(request("GET", target))[0] == 200


def test_a_request_of_http_1_0_needs_no_host(client: RawClient) -> None:
    assert client.ask(b"GET /v2/health/live HTTP/1.0\r\n\r\n")[0] == 200
    assert client.is_closed


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /v2/health/live HTTP/1.1\r\n\r\n", 400),
        (b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (request(body=BODY, Expect="200-ok"), 417),
        (request(Transfer_Encoding="gzip, chunked") + b"0\r\n\r\n", 501),
        (b"GET /v2/health/live HTTP/3.0\r\nHost: a\r\n\r\n", 505),
        (b"GET /v2/health/live HTTP/0.9\r\nHost: a\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (request("GET", "*"), 404),
    ],
)
def test_what_http_says_is_to_be_refused_is(client: RawClient, sent: bytes, status: int) -> None:
    assert client.ask(sent)[0] == status


def test_a_server_that_has_not_loaded_its_models_is_not_ready_rather_than_without_them() -> None:
    with serving(None, limits=LIMITS) as starting, RawClient(starting.port) as client:
        for sent in (INFER, request("GET", "/v2/models/m"), request("GET", "/v2/models/m/ready")):
            status, headers, _ = client.ask(sent)
            assert (status, headers["retry-after"]) == (503, "1")
        assert client.ask(request("GET", "/nothing"))[0] == 404


def test_a_method_that_a_path_does_not_take_is_answered_with_those_that_it_does(client: RawClient) -> None:
    status, headers, _ = client.ask(request("PUT", "/v2/models/m"))
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    status, headers, _ = client.ask(request("GET", "/v2/models/m/infer"))
    assert (status, headers["allow"]) == (405, "POST")


def test_a_half_closed_connection_gets_its_answers(client: RawClient) -> None:
    client.send(INFER + INFER)
    client.socket.shutdown(socket.SHUT_WR)

    assert [client.answer()[0], client.answer()[0]] == [200, 200]
    assert client.is_closed


def test_connection_close_is_honoured(client: RawClient) -> None:
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


def test_an_upgrade_header_is_ignored(client: RawClient) -> None:
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
        (request(body=BODY, Content_Encoding="br"), 415),
        (request(body=BODY, Content_Encoding="gzip, gzip"), 415),
        (request(body=BODY, authorization="Bearer other"), 400),
        (request(body=BODY, host="other"), 400),
        (request(body=BODY, content_length=str(len(BODY)), Content_Length=str(len(BODY))), 400),
        (request(body=BODY, **{f"X{number}": "" for number in range(120)}), 431),
        (request(body=b"", token="wrong", Content_Length="99999"), 401),
        (request(body=b"", token="wrong", Transfer_Encoding="chunked"), 401),
        (request(body=b"", token="wrong", Content_Length="99999", Expect="100-continue"), 401),
        (request("POST", "/v2/health/live", body=b" " * 100, token=None), 413),
        (request("POST", "/v2/health/ready", token=None, Transfer_Encoding="chunked"), 413),
    ],
)
def test_malformed_requests_are_refused_with_a_message(client: RawClient, data: bytes, status: int) -> None:
    found, headers, body = client.ask(data)

    assert found == status, body
    assert json.loads(body)["error"]
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
        with pytest.raises(ConnectionError):
            client.send(request("GET", "/metrics") * 400_000)


def test_killed_clients_leave_nothing_behind(server: RunningServer) -> None:
    for cut in range(1, len(INFER), 17):
        client = RawClient(server.port)
        client.send(INFER * 3 + INFER[:cut])
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        client.__exit__()


@contextmanager
def crowd_of(number: int, server: RunningServer) -> Iterator[list[RawClient]]:
    crowd = [RawClient(server.port) for _ in range(number)]
    try:
        eventually(lambda: len(server.server.connections) == number)
        yield crowd
    finally:
        for client in crowd:
            client.__exit__()


def test_a_caller_who_holds_all_connections_makes_room(server: RunningServer) -> None:
    other = request(body=BODY, token=OTHER_TOKEN)
    with crowd_of(50, server) as crowd:
        assert [client.ask(INFER)[0] for client in crowd[:48]] == [200] * 48
        assert [client.ask(other)[0] for client in crowd[48:]] == [200] * 2

        with RawClient(server.port) as late, RawClient(server.port) as later:
            assert late.ask(other)[0] == 200
            assert later.ask(other)[0] == 200

            assert [client.answer()[0] for client in crowd[:2]] == [0, 0]  # the oldest idle ones
            assert [client.ask(INFER)[0] for client in crowd[2:48]] == [200] * 46
            assert [client.ask(other)[0] for client in crowd[48:]] == [200] * 2


def test_a_caller_who_sends_slowly_on_all_connections_makes_room(server: RunningServer) -> None:
    with crowd_of(50, server) as crowd:
        for client in crowd:
            client.send(request(body=b" ", Content_Length="1000"))
        eventually(lambda: not server.server.strangers)

        with RawClient(server.port) as late:
            assert late.ask(request(body=BODY, token=OTHER_TOKEN))[0] == 200


def test_callers_of_closed_connections_are_forgotten(server: RunningServer) -> None:
    with crowd_of(3, server) as crowd:
        assert [client.ask(INFER)[0] for client in crowd] == [200] * 3
        assert crowd[0].ask(request(body=BODY, token=OTHER_TOKEN))[0] == 200
        assert sorted(len(theirs) for theirs in server.server.callers.values()) == [1, 2]

    eventually(lambda: not server.server.callers)


def test_strangers_keep_nobody_out(server: RunningServer) -> None:
    with crowd_of(50, server) as crowd:
        assert crowd[0].ask(INFER)[0] == 200

        with RawClient(server.port) as late:
            assert late.ask(INFER)[0] == 200

        assert crowd[0].ask(INFER)[0] == 200
        assert crowd[1].answer()[0] == 0  # the one that came first and said nothing made room


def test_a_crowd_with_one_new_token_is_authenticated_once(models: Path) -> None:
    class SlowTokens(KnownTokens):
        def authenticate(self, credential: str) -> str:
            let_pass(0.2)
            return super().authenticate(credential)

        def decide(self, credential: str, endpoint: str | None) -> None:
            let_pass(0.2)
            super().decide(credential, endpoint)

    tokens = SlowTokens()
    deployed = deployment(("m", "1", models / "m.onnx"))
    with serving(deployed, admission=tokens, limits=LIMITS) as server, crowd_of(40, server) as crowd:
        for client in crowd:
            client.send(INFER)

        assert [client.answer()[0] for client in crowd] == [200] * 40
        assert (tokens.authentications, tokens.decisions) == (1, 1)


def test_newcomers_do_not_displace_one_another(server: RunningServer) -> None:
    with crowd_of(50, server) as crowd:
        assert [client.ask(INFER)[0] for client in crowd] == [200] * 50

        newcomers = [RawClient(server.port) for _ in range(5)]
        eventually(lambda: len(server.server.strangers) == 5 and len(server.server.connections) == 50)

        assert [client.ask(INFER)[0] for client in newcomers] == [200] * 5
        for client in newcomers:
            client.__exit__()


async def dispatch(server: RunningServer, exchanges: list[Any]) -> None:
    for exchange in exchanges:
        server.server.dispatch(exchange)


def test_a_server_whose_connections_are_all_busy_refuses_another(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending: list[Any] = []
    with crowd_of(50, server) as crowd:
        with monkeypatch.context() as patch:
            patch.setattr(server.server, "dispatch", pending.append)
            for client in crowd:
                client.send(INFER)
            eventually(lambda: len(pending) == 50)
            with RawClient(server.port) as late:
                assert late.ask(INFER)[0] == 503

        server.do(dispatch(server, pending))
        assert [client.answer()[0] for client in crowd] == [200] * 50


def test_bytes_of_one_caller_are_limited(server: RunningServer) -> None:
    with crowd_of(5, server) as crowd:
        for client in crowd:
            client.send(request(body=b" " * 90_000, Content_Length="95000"))

        statuses = sorted(client.answer()[0] for client in crowd)

    assert 503 in statuses
    assert set(statuses) <= {503, 408}


def test_a_caller_who_holds_all_it_may_leaves_room_for_others(server: RunningServer) -> None:
    whole = BODY + b" " * 90_000
    with crowd_of(5, server) as crowd, RawClient(server.port) as other:
        for client in crowd:
            client.send(request(body=b" " * 90_000, Content_Length="95000"))
        eventually(lambda: server.server.metrics.held_bytes >= 90_000)

        assert other.ask(request(body=whole, token=OTHER_TOKEN))[0] == 200


def test_bytes_without_a_valid_token_are_not_held(server: RunningServer) -> None:
    """Each of them announces nearly a whole body, and sends what it can of it."""
    with crowd_of(16, server) as crowd, RawClient(server.port) as other:
        for client in crowd:
            client.send(request(body=b" " * 2000, token="wrong", Content_Length="99999"))
        refused = [client.answer()[0] for client in crowd]

        assert server.server.metrics.held_bytes == 0
        assert other.ask(INFER)[0] == 200

    assert refused == [401] * 16


def test_what_trails_a_body_means_nothing(client: RawClient) -> None:
    client.send(request(Transfer_Encoding="chunked"))
    client.send(b"%x\r\n%b\r\n0\r\nInference-Header-Content-Length: 3\r\n" % (len(BODY), BODY))
    client.send(b"Authorization: Bearer x\r\n\r\n")

    assert client.answer()[0] == 200


def test_trailers_are_limited_like_a_head(client: RawClient) -> None:
    client.send(request(Transfer_Encoding="chunked"))
    client.send(b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY))
    client.send(b"A: b\r\n" * 200)

    assert client.answer()[0] == 431


def test_answers_that_nobody_reads_are_limited(models: Path) -> None:
    """A small request with a large answer: what is not read counts for its caller, like what it sends."""
    limits = ServerLimits(held_bytes=4_000_000, pipelined=64)
    widened(models / "wide.onnx", 100_000)
    with serving(deployment(("m", "1", models / "wide.onnx")), limits=limits) as wide:
        with RawClient(wide.port) as greedy, RawClient(wide.port) as other:
            greedy.send(request(body=ONE) * 40)
            eventually(lambda: wide.server.metrics.held_bytes > 1_000_000)
            held = wide.server.metrics.held_bytes
            answered = other.ask(request(body=ONE, token=OTHER_TOKEN))[0]
            statuses = [greedy.answer()[0] for _ in range(40)]
        eventually(lambda: wide.server.metrics.held_bytes == 0)

    assert held <= 2_000_000
    assert answered == 200
    assert set(statuses) == {200, 503}


# ------------------------------------------------------------------------------------ overload, stopping


def test_overload_is_refused_instead_of_queued(models: Path) -> None:
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


def test_a_stopping_server_answers_received_requests(models: Path) -> None:
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
