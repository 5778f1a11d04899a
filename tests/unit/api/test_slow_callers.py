"""Callers who are slow, silent or too many: they lose their connections, and others are served meanwhile."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from falaj.apps.api import requests, server
from interfaces import ServedPlatform, serve
from polling import eventually

ALIVE = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
PATIENCE_S = 20.0
"""Whoever is not cut off by then never is."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPlatform]:
    """A door with two threads for operations."""
    with serve(tmp_path_factory.mktemp("served"), toml="[server]\nthreads = 2") as door:
        yield door


@contextmanager
def connected(door: ServedPlatform) -> Iterator[socket.socket]:
    where = urlsplit(door.url)
    with socket.create_connection((where.hostname, where.port), timeout=PATIENCE_S) as connection:
        yield connection


def drip(connection: socket.socket, piece: bytes) -> bytes:
    """Send `piece` again and again until the other side hangs up or has answered; what came back."""
    received, until = b"", time.monotonic() + PATIENCE_S
    connection.settimeout(0.03)
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
    """What comes back first; nothing if the other side hung up."""
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


# ---------------------------------------------------------------------------------------------------- heads


HALF = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(("began", "piece"), [(b"", b""), (HALF, b""), (HALF, b"X-More: y\r\n")])
def test_a_head_that_does_not_end_in_time_ends_the_connection(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch, began: bytes, piece: bytes
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.3)
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
def test_nobody_stays_after_an_answer(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.3)
    first, piece = LINGERING[what]
    with connected(served) as slow:
        slow.sendall(first)
        answered = answer(slow)

        drip(slow, piece)

    assert answered.startswith(b"HTTP/1.1 ")


def test_a_request_may_take_longer_than_its_head(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 1.0)

    def data() -> Iterator[bytes]:
        for _ in range(4):
            time.sleep(0.4)
            yield b"slow bytes"

    stored = served.http(served.admin).post("/api/v1/blobs/upload", content=data())

    assert stored.status_code == 200, stored.text
    assert stored.json()["size_bytes"] == 40


# ---------------------------------------------------------------------------------------------- connections


def test_connections_beyond_the_limit_are_refused_until_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 3)
    with serve(tmp_path) as door, ExitStack() as stack:
        opened = [stack.enter_context(connected(door)) for _ in range(3)]
        answers = [ask(each) for each in opened]

        with connected(door) as fourth:
            refused = ask(fourth)
        opened[0].close()
        freed = eventually(lambda: ask_anew(door), within=PATIENCE_S)

    assert all(told.startswith(b"HTTP/1.1 200") for told in answers)
    assert refused == b""
    assert freed.startswith(b"HTTP/1.1 200")


def ask(connection: socket.socket) -> bytes:
    try:
        connection.sendall(ALIVE)
    except OSError:
        return b""
    return answer(connection)


def ask_anew(door: ServedPlatform) -> bytes:
    with connected(door) as connection:
        return ask(connection)


# --------------------------------------------------------------------------------------------------- bodies


@pytest.fixture
def stalled(served: ServedPlatform) -> Iterator[Callable[[], socket.socket]]:
    """Begins an upload, and says no more."""
    head = f"POST /api/v1/blobs/upload HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.admin}\r\n"
    with ExitStack() as stack:

        def begin() -> socket.socket:
            connection = stack.enter_context(connected(served))
            connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"5\r\nbytes\r\n")
            return connection

        yield begin


def test_uploads_that_stall_keep_nobody_else_waiting(
    served: ServedPlatform, stalled: Callable[[], socket.socket]
) -> None:
    uploads = [stalled() for _ in range(5)]  # more than there are threads
    asked = [httpx.get(f"{served.url}/api/v1/users/whoami", headers=as_admin(served)) for _ in range(5)]
    for upload in uploads:
        upload.sendall(b"0\r\n\r\n")

    stored = [answer(upload) for upload in uploads]

    assert [each.status_code for each in asked] == [200] * 5
    assert all(told.startswith(b"HTTP/1.1 200") for told in stored)


def test_an_upload_that_says_nothing_for_too_long_is_given_up(
    served: ServedPlatform, stalled: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served.platform.blobs.list().items
    monkeypatch.setattr(requests, "CHUNK_S", 0.2)

    told = [answer(upload) for upload in [stalled() for _ in range(3)]]

    assert all(b"stream.interrupted" in each for each in told)
    assert served.platform.blobs.list().items == before
    assert served.platform.put("whole", b"bytes").size_bytes == 5


@pytest.mark.parametrize("piece", [b"", b" "])
def test_a_body_that_does_not_end_in_time_is_given_up(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    monkeypatch.setattr(requests, "BODY_S", 0.3)
    monkeypatch.setattr(server, "HEAD_S", 0.3)
    with connected(served) as slow:  # a stranger: the sign-in page's door is open to all
        slow.sendall(b"POST /signin HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")

        told = drip(slow, piece)

    assert b"stream.interrupted" in told


def as_admin(served: ServedPlatform) -> dict[str, str]:
    return {"Authorization": f"Bearer {served.admin}"}
