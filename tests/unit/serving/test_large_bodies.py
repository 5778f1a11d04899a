"""Large bodies of binary tensors: received without the parser, whole and in order, however they are cut."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from certificates import make_certificate
from falaj.apps.model_server.http.exchange import HttpExchange
from falaj.apps.model_server.http.large_bodies import ALIGNED_BYTES, LargeBody
from falaj.apps.model_server.limits import ServerLimits
from falaj.records.control.tls import Tls
from model_servers import OTHER_TOKEN, RawClient, RunningServer, deployment, request, save, serving
from polling import eventually, let_pass

MIB = 1 << 20
LIMITS = ServerLimits(body_bytes=9 * MIB, held_bytes=24 * MIB, body_s=1.0, linger_s=0.3, sweep_s=0.05)
SMALL = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'


def row_sums(path: Path) -> Path:
    """Write a model that adds the two numbers of each row."""
    return save(
        path,
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1])],
        {"w": np.ones((2, 1), np.float32)},
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return row_sums(tmp_path_factory.mktemp("models") / "m.onnx")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with serving(deployment(("m", "1", model)), limits=LIMITS) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    with RawClient(server.port) as made:
        assert made.ask(request(body=SMALL))[0] == 200  # the token is known from now on
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(server: RunningServer) -> Iterator[None]:
    yield
    eventually(lambda: not server.server.connections)
    assert server.server.metrics.held_bytes == 0


class Tensor:
    """A request of binary rows, and its right answer."""

    def __init__(self, rows: int, *, seed: int = 0, pad: int = 0, **headers: str) -> None:
        self._rows = np.random.default_rng(seed).integers(-999, 999, (rows, 2)).astype(np.float32)
        raw = self._rows.tobytes()
        tensor = {"name": "x", "shape": [rows, 2], "datatype": "FP32"}
        tensor["parameters"] = {"binary_data_size": len(raw)}
        head = (
            json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode() + b" " * pad
        )
        self.body = head + raw
        self.request = request(body=self.body, Inference_Header_Content_Length=str(len(head)), **headers)
        self.head_bytes = len(self.request) - len(self.body)

    def is_answered(self, answer: tuple[int, dict[str, str], bytes]) -> bool:
        status, headers, content = answer
        assert status == 200, content[:300]
        found = np.frombuffer(content[int(headers["inference-header-content-length"]) :], np.float32)
        return np.array_equal(found, self._rows.sum(axis=1))


@pytest.mark.parametrize("rows", [32_767, 32_768, 32_769, 131_072, 1_000_000])
def test_a_large_tensor_is_answered_and_the_connection_stays(client: RawClient, rows: int) -> None:
    for seed in range(3):
        given = Tensor(rows, seed=seed)

        assert given.is_answered(client.ask(given.request))
    assert client.ask(request(body=SMALL))[0] == 200


@pytest.mark.parametrize("pad", range(8))
def test_tensors_may_begin_at_any_byte(client: RawClient, pad: int) -> None:
    given = Tensor(100_000, pad=pad)

    assert given.is_answered(client.ask(given.request))


@pytest.mark.parametrize("piece", [1, 1000, 65_536, 300_000, 799_000])
def test_a_body_may_come_in_two_pieces_with_a_pause(client: RawClient, piece: int) -> None:
    given = Tensor(100_000)

    client.send(given.request[: given.head_bytes + piece])
    let_pass(0.05)
    client.send(given.request[given.head_bytes + piece :])

    assert given.is_answered(client.answer())


def test_requests_behind_a_large_one_are_answered_in_order(client: RawClient) -> None:
    large = [Tensor(60_000 + number, seed=number) for number in range(4)]
    everything = b"".join(each.request + request(body=SMALL) for each in large)

    sender = threading.Thread(target=client.send, args=(everything,))
    sender.start()
    for each in large:
        assert each.is_answered(client.answer())
        assert client.answer()[0] == 200
    sender.join()


def test_a_client_that_is_not_known_yet_may_begin_with_a_large_body(server: RunningServer) -> None:
    given = Tensor(500_000)
    with RawClient(server.port) as client:
        assert given.is_answered(client.ask(given.request.replace(b"Bearer ", b"Bearer  ", 1)))


def test_a_client_that_expects_continue_sends_a_large_body(client: RawClient) -> None:
    given = Tensor(200_000, Expect="100-continue")

    client.send(given.request[: given.head_bytes])
    assert client.line() == b"HTTP/1.1 100 Continue\r\n"
    assert client.line() == b"\r\n"
    client.send(given.body)

    assert given.is_answered(client.answer())


def test_a_body_that_stops_coming_is_refused(client: RawClient) -> None:
    given = Tensor(500_000)

    client.send(given.request[: given.head_bytes + MIB])

    status, headers, _ = client.answer()
    assert (status, headers["connection"]) == (408, "close")
    client.send(given.body[MIB : 2 * MIB])  # is not read as a request


def test_clients_that_vanish_leave_nothing(server: RunningServer) -> None:
    for sent in (300_000, 2 * MIB, 7 * MIB):
        given = Tensor(1_000_000)
        with RawClient(server.port) as client:
            client.ask(request(body=SMALL))
            client.send(given.request[:sent])
    eventually(lambda: not server.server.connections)

    assert server.server.metrics.held_bytes == 0


def test_a_caller_cannot_hold_more_than_its_share(server: RunningServer) -> None:
    given = Tensor(1_000_000)
    clients = [RawClient(server.port) for _ in range(6)]
    try:
        for each in clients:
            assert each.ask(request(body=SMALL))[0] == 200
        for each in clients:
            threading.Thread(target=_send_all_but_one, args=(each, given.request), daemon=True).start()
        statuses = [each.answer()[0] for each in clients]
        with RawClient(server.port) as other:
            small = other.ask(request(body=SMALL, token=OTHER_TOKEN))[0]
    finally:
        for each in clients:
            each.__exit__()

    assert 503 in statuses
    assert small == 200


def _send_all_but_one(client: RawClient, data: bytes) -> None:
    with suppress(OSError):  # refused meanwhile
        client.send(data[:-1])


@pytest.mark.parametrize("json_bytes", ["0", "9999999999999999999999999999", "-1", "x", "1_0", "800100"])
def test_a_false_length_of_the_json_is_refused(client: RawClient, json_bytes: str) -> None:
    given = Tensor(100_000)

    status, _, content = client.ask(request(body=given.body, Inference_Header_Content_Length=json_bytes))

    assert status == 400, content


def test_other_paths_take_a_large_body_too(client: RawClient) -> None:
    given = Tensor(100_000)

    for path in ("/v2/repository/models/m/load", "/v2/repository/index", "/predict/m", "/nothing"):
        headers = {"Inference_Header_Content_Length": "10"}
        assert client.ask(request(path=path, body=given.body, **headers))[0] in (400, 404)


def test_a_large_body_may_come_over_tls(model: Path, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=certificate.pem)
    tls = Tls(certificate=certificate.pem, key=certificate.key)
    with serving(deployment(("m", "1", model)), limits=LIMITS, tls=tls) as secure:
        client = RawClient(secure.port)
        client.socket = trust.wrap_socket(client.socket, server_hostname="127.0.0.1")
        client._reader = client.socket.makefile("rb")
        with client:
            assert client.ask(request(body=SMALL))[0] == 200
            for seed in range(3):
                given = Tensor(700_000, seed=seed)
                assert given.is_answered(client.ask(given.request))
            assert client.ask(request(body=SMALL))[0] == 200


def test_the_loop_of_the_standard_library_receives_them_as_well(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = []

    def run(main: Callable[[], Awaitable[None]]) -> None:
        async def awaited() -> None:
            loops.append(type(asyncio.get_running_loop()).__module__)
            await main()

        asyncio.run(awaited())

    monkeypatch.setattr("model_servers.run", run)
    with serving(deployment(("m", "1", model)), limits=LIMITS) as plain, RawClient(plain.port) as client:
        assert client.ask(request(body=SMALL))[0] == 200
        given = Tensor(700_000)
        assert given.is_answered(client.ask(given.request))
        assert client.ask(request(body=SMALL))[0] == 200
    assert loops == ["asyncio.unix_events"]


def test_a_large_body_passes_the_parser_by(client: RawClient, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    add = HttpExchange.add
    monkeypatch.setattr(
        HttpExchange, "add", lambda self, body: (parsed.append(len(body)), add(self, body))[1]
    )
    given = Tensor(1_000_000)

    assert given.is_answered(client.ask(given.request))

    assert sum(parsed) < MIB < len(given.body)


def test_the_tensors_are_aligned() -> None:
    class Whole:
        body = memoryview(b"")

        def body_arrived(self, size: int) -> bool:
            return True

        def body_complete(self, body: memoryview) -> None:
            self.body = body

        def pause_writing(self) -> None: ...
        def resume_writing(self) -> None: ...
        def eof_received(self) -> bool:
            return False

        def connection_lost(self, exc: Exception | None) -> None: ...

    for tensors_at in range(0, 200, 7):
        reader = Whole()
        receiver = LargeBody(reader, b"{}", 1000, tensors_at=tensors_at)
        while not reader.body:
            buffer = receiver.get_buffer(-1)
            receiver.buffer_updated(min(len(buffer), 333))

        assert np.frombuffer(reader.body, np.uint8)[tensors_at:].ctypes.data % ALIGNED_BYTES == 0
        assert bytes(reader.body[:2]) == b"{}"
