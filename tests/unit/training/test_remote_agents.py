"""Agents over TLS: who is served, who is refused, and what a stranger can do."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from falaj.control.jobs.agent_server import MOST_NEWCOMERS, RemoteAgentServer
from falaj.drivers.kubernetes.certificate import ensure_certificate, public_part
from falaj.training.runtime.agent.protocol import CERTIFICATE_VARIABLE, SECRET_VARIABLE, SocketAgent
from falaj.training.runtime.errors import AgentLost, AgentRefused
from polling import PATIENCE_S, eventually

SECRETS = {"job_1/1": "s" * 64, "job_2/1": "t" * 64}


class Echo:
    """Answers every call with its name and the size of its body."""

    def answer(self, head: dict[str, Any], body: Iterator[bytes]) -> tuple[Any, int, Iterator[bytes]]:
        return [head["call"], sum(len(piece) for piece in body)], 3, iter((b"abc",))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteAgentServer]:
    pem = ensure_certificate(tmp_path / "agent.pem")
    (tmp_path / "pinned.pem").write_text(public_part(pem))
    monkeypatch.setenv(CERTIFICATE_VARIABLE, str(tmp_path / "pinned.pem"))
    present(monkeypatch, "job_1/1", SECRETS["job_1/1"])
    made = RemoteAgentServer(
        ("127.0.0.1", 0),
        certificate=pem,
        key=pem,
        secret_of=SECRETS.get,
        is_current=lambda attempt: attempt == "job_1/1",
        on_fenced=lambda: None,
    )
    yield made
    made.close()


def present(monkeypatch: pytest.MonkeyPatch, attempt: str, secret: str) -> None:
    job, number = attempt.split("/")
    for name, value in {"FALAJ_JOB": job, "FALAJ_ATTEMPT": number, SECRET_VARIABLE: secret}.items():
        monkeypatch.setenv(name, value)


@contextmanager
def connected(server: RemoteAgentServer, patience_s: float = PATIENCE_S) -> Iterator[SocketAgent]:
    agent = SocketAgent.connect(f"tls://127.0.0.1:{server.port}", patience_s=patience_s)
    try:
        yield agent
    finally:
        agent.close()


def test_an_attempt_is_served_with_its_secret(server: RemoteAgentServer) -> None:
    with server.serving("job_1/1", Echo()), connected(server) as agent:
        assert agent.call("save_part", [b"x" * (3 << 20)]) == (["save_part", 3 << 20], bytearray(b"abc"))


@pytest.mark.parametrize("secret", ["wrong", "t" * 64, "é"])
def test_a_wrong_secret_is_refused_at_once(
    server: RemoteAgentServer, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    present(monkeypatch, "job_1/1", secret)

    with (
        server.serving("job_1/1", Echo()),
        pytest.raises(AgentRefused, match="does not present"),
        connected(server, patience_s=PATIENCE_S),
    ):
        pass


def test_an_attempt_that_is_over_is_told_so(
    server: RemoteAgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    present(monkeypatch, "job_2/1", SECRETS["job_2/1"])

    with pytest.raises(AgentRefused, match="is over"), connected(server, patience_s=PATIENCE_S):
        pass


def test_an_attempt_that_is_not_served_yet_comes_again(server: RemoteAgentServer) -> None:
    with pytest.raises(AgentLost, match="no agent answers"), connected(server, patience_s=0.1):
        pass

    with server.serving("job_1/1", Echo()), connected(server) as agent:
        assert agent.call("progress")[0] == ["progress", 0]


def test_another_certificate_is_not_trusted(
    server: RemoteAgentServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ensure_certificate(tmp_path / "other.pem")
    (tmp_path / "other-pinned.pem").write_text(public_part(other))
    monkeypatch.setenv(CERTIFICATE_VARIABLE, str(tmp_path / "other-pinned.pem"))

    with pytest.raises(AgentLost, match="another certificate"), connected(server, patience_s=PATIENCE_S):
        pass


def test_a_connection_ends_with_its_attempt(server: RemoteAgentServer) -> None:
    with server.serving("job_1/1", Echo()), connected(server, patience_s=0.1) as agent:
        agent.call("progress")
        server._sessions["job_1/1"].close()

        with pytest.raises(AgentLost):
            agent.call("progress")


def test_strangers_do_not_keep_an_attempt_out(server: RemoteAgentServer, tmp_path: Path) -> None:
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MOST_NEWCOMERS + 20)]
    try:
        with server.serving("job_1/1", Echo()), connected(server) as agent:
            assert agent.call("progress")[0] == ["progress", 0]
    finally:
        for each in strangers:
            each.close()


def test_a_long_first_frame_is_not_read(server: RemoteAgentServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", server.port)) as plain,
        context.wrap_socket(plain) as stranger,
    ):
        stranger.sendall((1 << 20).to_bytes(4, "big"))

        assert eventually(lambda: stranger.recv(1) == b"")


def test_the_key_is_readable_by_its_owner_alone_and_made_once(tmp_path: Path) -> None:
    pem = ensure_certificate(tmp_path / "agent.pem")
    before = pem.read_bytes()

    assert ensure_certificate(pem).read_bytes() == before
    assert pem.stat().st_mode & 0o777 == 0o600
    assert "PRIVATE" not in public_part(pem)
