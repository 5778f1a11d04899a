"""Requests leave this machine for allowed hosts and addresses only, and end in time."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import ValidationError

from falaj.drivers.egress import http as driver
from falaj.drivers.egress.http import HttpEgress
from falaj.errors import InvalidInput
from falaj.ports.egress import DeliveryFailed
from falaj.records.config import EgressConfig
from falaj.records.governance.egress import read_egress_host

ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"


def egress(*allow: str, ca: Path | None = None) -> HttpEgress:
    return HttpEgress(EgressConfig(allow=allow).allow, ca=ca)


def post(sender: HttpEgress, url: str, **options: Any) -> int:
    options.setdefault("admit", lambda address: None)
    return sender.post(url, headers={"x-test": "1"}, body=b"{}", **options)


PAUSE_S = 0.05
"""Between two bytes of a slow answer."""


class Listener:
    """Accepts one connection after another, and answers each with `answer`, byte by byte if it is `slow`."""

    def __init__(
        self, *, context: ssl.SSLContext | None = None, answer: bytes = ANSWER, slow: bool = False
    ) -> None:
        self.requests: list[bytes] = []
        self._context, self._answer, self._slow = context, answer, slow
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._socket.close()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                plain, _ = self._socket.accept()
                with closing(
                    self._context.wrap_socket(plain, server_side=True) if self._context else plain
                ) as each:
                    self.requests.append(_read_request(each))
                    for byte in self._answer if self._slow else ():
                        each.sendall(bytes([byte]))
                        if self._over.wait(PAUSE_S):
                            return
                    if not self._slow:
                        each.sendall(self._answer)
            except OSError:
                continue


def _read_request(connection: socket.socket) -> bytes:
    """Read head and body, which may come one by one; what is left unread would reset the connection."""
    request = b""
    while not request.endswith(b"\r\n\r\n{}") and (piece := connection.recv(65536)):
        request += piece
    return request


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener()) as made:
        yield made


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for the name `localhost` alone, and its key, in one file."""
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(made.public_bytes(Encoding.PEM) + private)
    return path


@pytest.fixture
def secure(certificate: Path) -> Iterator[Listener]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with closing(Listener(context=context)) as made:
        yield made


def resolving_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Let every name be `addresses`; return the list of names that are asked for."""
    asked: list[str] = []

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        return [
            (socket.AF_INET6 if ip_address(each).version == 6 else socket.AF_INET, 1, 6, "", (each, port))
            for each in addresses
        ]

    monkeypatch.setattr(driver.socket, "getaddrinfo", resolve)
    return asked


def test_a_request_reaches_a_listed_address(listener: Listener) -> None:
    status = post(egress("127.0.0.0/8"), f"http://127.0.0.1:{listener.port}/hook?a=b")

    assert status == 204
    assert listener.requests[0].startswith(b"POST /hook?a=b HTTP/1.1\r\n")


def test_nothing_is_allowed_unless_it_is_listed(listener: Listener) -> None:
    with pytest.raises(DeliveryFailed, match=r"egress\.allow"):
        post(egress(), f"http://127.0.0.1:{listener.port}/")

    assert listener.requests == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "::1",
        "fe80::1",
        "fd00::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "64:ff9b:1::7f00:1",
        "::ffff:0:127.0.0.1",
        "fec0::1",
        "2002:a00:1::1",
        "::a00:1",
    ],
)
def test_an_allowed_name_that_leads_to_a_private_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    resolving_to(monkeypatch, address)

    with pytest.raises(DeliveryFailed, match=r"a private address that egress\.allow does not list"):
        post(egress("hooks.example.com"), "https://hooks.example.com/")


def test_a_name_is_resolved_once_and_the_address_is_asked_about(
    monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    asked, admitted = resolving_to(monkeypatch, "127.0.0.1"), list[str]()

    post(
        egress("hooks.example.com", "127.0.0.0/8"),
        f"http://hooks.example.com:{listener.port}/",
        admit=admitted.append,
    )

    assert [host for host in asked if host != "127.0.0.1"] == ["hooks.example.com"]
    assert admitted == ["127.0.0.1"]
    assert b"\r\nHost: hooks.example.com:" in listener.requests[0]


def test_what_is_not_admitted_is_not_sent(listener: Listener) -> None:
    def refuse(address: str) -> None:
        raise PermissionError(address)

    with pytest.raises(PermissionError):
        post(egress("127.0.0.0/8"), f"http://127.0.0.1:{listener.port}/", admit=refuse)

    assert listener.requests == []


def test_plain_http_leaves_this_machine_for_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving_to(monkeypatch, "10.0.0.7")

    with pytest.raises(DeliveryFailed, match="use https"):
        post(egress("hooks.example.com", "10.0.0.0/8"), "http://hooks.example.com/")


def test_a_listed_port_allows_no_other(listener: Listener) -> None:
    sender = egress(f"127.0.0.1:{listener.port}")

    assert post(sender, f"http://127.0.0.1:{listener.port}/") == 204
    with pytest.raises(InvalidInput):
        sender.require("http://127.0.0.1:9/")


def test_tls_is_checked_against_the_name_and_the_given_authority(secure: Listener, certificate: Path) -> None:
    allowed = egress("localhost", "127.0.0.0/8", ca=certificate)

    assert post(allowed, f"https://localhost:{secure.port}/") == 204
    with pytest.raises(DeliveryFailed, match="certificate"):
        post(allowed, f"https://127.0.0.1:{secure.port}/")
    with pytest.raises(DeliveryFailed, match="certificate"):
        post(egress("localhost", "127.0.0.0/8"), f"https://localhost:{secure.port}/")


def test_an_answer_that_trickles_in_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "DEADLINE_S", 0.3)
    with (
        closing(Listener(answer=b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 90, slow=True)) as slow,
        pytest.raises(DeliveryFailed),
    ):
        post(egress("127.0.0.0/8"), f"http://127.0.0.1:{slow.port}/")


@pytest.mark.parametrize(
    "answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 2000000 \r\n\r\n", b"\xff" * 100_000]
)
def test_an_answer_that_is_not_http_is_a_failure(answer: bytes) -> None:
    with closing(Listener(answer=answer)) as odd, pytest.raises(DeliveryFailed):
        post(egress("127.0.0.0/8"), f"http://127.0.0.1:{odd.port}/secret-path")


@pytest.mark.parametrize(
    "given", ["", "https://hooks.example.com", "a b", "host:0", "host:70000", "10.0.0.1/8", "*"]
)
def test_an_entry_that_is_no_host_is_refused(given: str) -> None:
    with pytest.raises(ValidationError):
        EgressConfig(allow=(given,))


@pytest.mark.parametrize(
    ("given", "port"),
    [("[fd00::1]:8443", 8443), ("fd00::/8", None), ("Hooks.Example.com.", None), ("10.0.0.7:1", 1)],
)
def test_entries_are_hosts_addresses_and_networks(given: str, port: int | None) -> None:
    rule = read_egress_host(EgressConfig(allow=(given,)).allow[0])

    assert rule.port == port
    assert (rule.network is None) == (rule.host == "hooks.example.com")
