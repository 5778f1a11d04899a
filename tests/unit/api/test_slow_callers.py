"""Slow, silent or too many callers lose their connections, and others are served meanwhile."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from falaj.apps import http_server
from falaj.apps.api import app, requests
from interfaces import ServedPlatform, serve
from polling import PATIENCE_S, eventually, let_pass

ALIVE = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
PACE_S = 0.03
"""How long a client that sends slowly looks for an answer between two pieces."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPlatform]:
    """A served platform with two threads for operations."""
    with serve(tmp_path_factory.mktemp("served"), toml="[server]\nthreads = 2") as platform:
        yield platform


@contextmanager
def connected(platform: ServedPlatform) -> Iterator[socket.socket]:
    where = urlsplit(platform.url)
    with socket.create_connection((where.hostname, where.port), timeout=PATIENCE_S) as connection:
        yield connection


def drip(connection: socket.socket, piece: bytes) -> bytes:
    """Send `piece` repeatedly until the server closes or has answered; return the response."""
    received, until = b"", time.monotonic() + PATIENCE_S
    connection.settimeout(PACE_S)
    while time.monotonic() < until:
        try:
            connection.sendall(piece)
            received += (more := connection.recv(65536))
            if not more:
                return received
        except TimeoutError:
            continue
        except OSError:
            return received
    raise AssertionError("the connection is still open")


def answer(connection: socket.socket) -> bytes:
    """Return the first bytes of the response; none if the server closed the connection."""
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


# -------------------------------------------------------------------------------------------------- headers


HALF = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(("began", "piece"), [(b"", b""), (HALF, b""), (HALF, b"X-More: y\r\n")])
def test_a_head_that_does_not_end_in_time_ends_the_connection(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch, began: bytes, piece: bytes
) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.3)
    with connected(served) as slow:
        slow.sendall(began)
        others = httpx.get(f"{served.url}/healthz")

        received = drip(slow, piece)

    assert received == b""
    assert others.status_code == 200


LINGERING: dict[str, tuple[bytes, bytes]] = {
    "half a head": (ALIVE + b"GET /healthz HTTP/1.1\r\n", b"X-More: y\r\n"),
    "empty lines": (ALIVE, b"\r\n"),
    "a body that nobody reads": (
        b"POST /api/v1/blobs/upload HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n",
        b"x",
    ),
}


@pytest.mark.parametrize("what", LINGERING)
def test_a_lingering_connection_is_closed_after_the_answer(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.3)
    first, piece = LINGERING[what]
    with connected(served) as slow:
        slow.sendall(first)
        answered = answer(slow)

        drip(slow, piece)

    assert answered.startswith(b"HTTP/1.1 ")


def test_a_request_may_take_longer_than_its_head(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 1.0)

    def data() -> Iterator[bytes]:
        for _ in range(4):
            let_pass(0.4)
            yield b"slow bytes"

    stored = served.http(served.admin).post("/api/v1/blobs/upload", content=data())

    assert stored.status_code == 200, stored.text
    assert stored.json()["size_bytes"] == 40


# ---------------------------------------------------------------------------------------------- connections


@pytest.mark.slow
def test_silent_connections_beyond_the_limit_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger who opens all connections and says nothing keeps nobody out."""
    monkeypatch.setattr(http_server, "CONNECTIONS", 3)
    with serve(tmp_path) as platform, ExitStack() as stack:
        silent = [stack.enter_context(connected(platform)) for _ in range(2)]
        own = stack.enter_context(connected(platform))
        answers = [ask(own)]

        with connected(platform) as fourth:
            answers += [ask(fourth), ask(own)]

        assert silent[0].recv(1) == b""  # the one that has waited longest

    assert all(response.startswith(b"HTTP/1.1 200") for response in answers)


@pytest.fixture
def large(served: ServedPlatform) -> int:
    """The size of the blob `large`: more than what the kernel takes of an answer that nobody reads."""
    size = 20_000_000
    if not any(each.name == "large" for each in served.platform.blobs.list().items):
        served.platform.put("large", bytes(size))
    return size


def ask_for_large(platform: ServedPlatform, connection: socket.socket) -> None:
    head = "GET /api/v1/blobs/read?blob=large HTTP/1.1\r\nHost: x\r\n"
    connection.sendall(f"{head}Authorization: Bearer {platform.admin}\r\n\r\n".encode())


def test_a_client_that_does_not_read_its_answer_loses_its_connection(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr(http_server, "READ_S", 0.3)
    with connected(served) as silent:
        ask_for_large(served, silent)

        def is_closed() -> bool:
            try:
                silent.sendall(ALIVE)
            except OSError:
                return True
            return False

        assert eventually(is_closed)


def test_an_answer_that_is_read_late_is_read_whole(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection does not wait for another request any longer, but for its answer to be read."""
    body = served.as_admin.get("/api/v1/policies/schema").content
    monkeypatch.setattr(http_server, "HEAD_S", 0.1)
    head = f"GET /api/v1/policies/schema HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.admin}\r\n\r\n"
    where = urlsplit(served.url)
    with socket.socket() as late:
        late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        late.settimeout(PATIENCE_S)
        late.connect((where.hostname, where.port))
        late.sendall(head.encode())
        assert late.recv(1, socket.MSG_PEEK)
        let_pass(0.5)

        received = b"".join(iter(lambda: late.recv(65536), b""))

    assert received.endswith(body)


def test_a_client_that_reads_slowly_gets_its_answer(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr(http_server, "READ_S", 0.5)
    monkeypatch.setattr(http_server, "READ_BYTES", 1)
    with connected(served) as slow:
        ask_for_large(served, slow)
        read = 0
        while read < large:
            let_pass(0.02)
            read += (got := len(slow.recv(1_000_000)))
            assert got


@pytest.mark.slow
def test_clients_that_do_not_read_their_answers_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS", 4)
    with serve(tmp_path) as platform, ExitStack() as stack:
        platform.platform.put("large", bytes(20_000_000))
        for _ in range(4):
            silent = stack.enter_context(connected(platform))
            ask_for_large(platform, silent)
            assert silent.recv(1, socket.MSG_PEEK)

        assert eventually(lambda: request_on_new_connection(platform).startswith(b"HTTP/1.1 200"))


@pytest.mark.slow
def test_strangers_in_the_middle_of_a_body_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS", 3)
    with serve(tmp_path) as platform, ExitStack() as stack:
        for stranger in [stack.enter_context(connected(platform)) for _ in range(3)]:
            stranger.sendall(b"POST /signin HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\n{")

        assert eventually(lambda: request_on_new_connection(platform).startswith(b"HTTP/1.1 200"))


@pytest.mark.slow
def test_requests_of_one_caller_leave_connections_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS", 4)
    with serve(tmp_path) as platform, ExitStack() as stack:
        token = platform.admin
        head = (
            f"POST /api/v1/tokens/sign_in_link HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
        )
        crowd = [stack.enter_context(connected(platform)) for _ in range(4)]
        with platform.parts.gate.database.write():  # all of them wait for it
            for each in crowd:
                each.sendall(head.encode())
            refused = eventually(lambda: [response for response in map(received, crowd) if response])

            other = request_on_new_connection(platform)

    assert all(response.startswith(b"HTTP/1.1 503") for response in refused)
    assert other.startswith(b"HTTP/1.1 200")


def ask(connection: socket.socket) -> bytes:
    try:
        connection.sendall(ALIVE)
    except OSError:
        return b""
    return answer(connection)


def request_on_new_connection(platform: ServedPlatform) -> bytes:
    with connected(platform) as connection:
        return ask(connection)


# --------------------------------------------------------------------------------------------------- bodies


@pytest.fixture
def stalled(served: ServedPlatform) -> Iterator[Callable[[], socket.socket]]:
    """Begin an upload, and send nothing more."""
    head = f"POST /api/v1/blobs/upload HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.admin}\r\n"
    with ExitStack() as stack:

        def begin() -> socket.socket:
            connection = stack.enter_context(connected(served))
            connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"5\r\nbytes\r\n")
            return connection

        yield begin


def test_stalled_uploads_do_not_delay_other_callers(
    served: ServedPlatform, stalled: Callable[[], socket.socket]
) -> None:
    uploads = [stalled() for _ in range(5)]  # more than there are threads
    responses = [httpx.get(f"{served.url}/api/v1/users/whoami", headers=as_admin(served)) for _ in range(5)]
    for upload in uploads:
        upload.sendall(b"0\r\n\r\n")

    stored = [answer(upload) for upload in uploads]

    assert [each.status_code for each in responses] == [200] * 5
    assert all(response.startswith(b"HTTP/1.1 200") for response in stored)


def test_an_idle_upload_is_abandoned(
    served: ServedPlatform, stalled: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served.platform.blobs.list().items
    monkeypatch.setattr(requests, "RATE_WINDOW_S", 0.2)

    responses = [answer(upload) for upload in [stalled() for _ in range(3)]]

    assert all(b"stream.interrupted" in each for each in responses)
    assert served.platform.blobs.list().items == before
    assert served.platform.put("whole", b"bytes").size_bytes == 5


@pytest.mark.parametrize("piece", [b"", b" "])
def test_a_body_that_does_not_end_in_time_is_abandoned(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    monkeypatch.setattr(requests, "BODY_S", 0.3)
    monkeypatch.setattr(app, "SIGN_IN_S", 0.3)
    monkeypatch.setattr(http_server, "HEAD_S", 0.3)
    strangers = "POST /signin HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\n"
    own = f"POST /api/v1/users/whoami HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.admin}\r\n"
    for head in (strangers, f"{own}Content-Length: 100000\r\n\r\n"):
        with connected(served) as slow:
            slow.sendall(head.encode())

            response = drip(slow, piece)

        assert b"stream.interrupted" in response


def test_stalled_uploads_of_one_caller_do_not_block_those_of_others(
    served: ServedPlatform, stalled: Callable[[], socket.socket]
) -> None:
    uploads = [stalled() for _ in range(5)]  # more than there are threads
    eventually(lambda: request_on_new_connection(served))

    other = served.http(served.developer).post("/api/v1/blobs/upload?workspace=risk", content=b"bytes")

    assert other.status_code == 200, other.text
    for upload in uploads:
        upload.sendall(b"0\r\n\r\n")
    assert all(answer(upload).startswith(b"HTTP/1.1 200") for upload in uploads)


def test_long_operations_of_one_caller_leave_threads_to_others(served: ServedPlatform) -> None:
    """Those that wait for a parser, or for memory, have a thread meanwhile."""
    probe = served.parts.services.probe  # type: ignore[attr-defined]
    head = f"POST /api/v1/probe/wait HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.stranger}\r\n"
    with ExitStack() as stack:
        crowd = [stack.enter_context(connected(served)) for _ in range(5)]  # more than there are threads
        for each in crowd:
            each.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())
        eventually(lambda: probe.waiting)

        other = served.http(served.developer).post("/api/v1/audit/verify", json={})
        ready = httpx.get(f"{served.url}/readyz")

        assert other.status_code == 403  # it was decided
        assert ready.status_code == 503  # there is no controller
        probe.go_on.set()
        assert all(answer(each).startswith(b"HTTP/1.1 200") for each in crowd)


def test_an_upload_that_is_too_slow_is_given_up(
    served: ServedPlatform, stalled: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "RATE_WINDOW_S", 0.5)
    monkeypatch.setattr(http_server, "HEAD_S", 0.3)
    before = served.platform.blobs.list().items
    slow = stalled()

    response = drip(slow, b"1\r\nx\r\n")

    assert b"bytes a second" in response
    assert served.platform.blobs.list().items == before


# --------------------------------------------------------------------------------------------------- memory


SIGN_IN = "POST /signin HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        f"{SIGN_IN}Content-Length: 4097\r\n\r\n".encode(),
        f"{SIGN_IN}Transfer-Encoding: chunked\r\n\r\n1001\r\n".encode() + b" " * 4097,
    ],
)
def test_a_stranger_sends_no_more_than_a_code(served: ServedPlatform, sent: bytes) -> None:
    with connected(served) as stranger:
        stranger.sendall(sent)

        assert answer(stranger).startswith(b"HTTP/1.1 413")


def test_sign_ins_of_many_take_little_memory(served: ServedPlatform) -> None:
    body = b" " * 800_000
    before = resident_bytes()
    with ExitStack() as stack:
        crowd = [stack.enter_context(connected(served)) for _ in range(200)]
        for each in crowd:
            with suppress(OSError):
                each.sendall(f"{SIGN_IN}Content-Length: 1048575\r\n\r\n".encode() + body)
        answered = [answer(each) for each in crowd]
        grown = resident_bytes() - before

    assert all(response.startswith(b"HTTP/1.1 413") for response in answered)
    assert grown < 50_000_000


def test_bodies_of_one_caller_leave_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HELD_BYTES", 1_000_000)
    with serve(tmp_path) as served, ExitStack() as stack:
        head = f"POST /api/v1/users/whoami HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.admin}\r\n"
        crowd = [stack.enter_context(connected(served)) for _ in range(4)]
        for each in crowd:
            each.sendall(f"{head}Content-Length: 300001\r\n\r\n".encode() + b" " * 300_000)
        refused = eventually(lambda: [response for response in map(received, crowd) if response])

        other = served.http(served.developer).post(
            "/api/v1/users/whoami",
            content=b" " * 100_000 + b"{}",
            headers={"Content-Type": "application/json"},
        )

    assert all(response.startswith(b"HTTP/1.1 503") for response in refused)
    assert other.status_code == 200


def received(connection: socket.socket) -> bytes:
    """What has come back by now."""
    connection.settimeout(PACE_S)
    try:
        return connection.recv(65536, socket.MSG_PEEK)
    except TimeoutError:
        return b""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def as_admin(served: ServedPlatform) -> dict[str, str]:
    return {"Authorization": f"Bearer {served.admin}"}
