"""TLS 1.3 is required except on loopback."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

import falaj as fj
from certificates import Certificate, make_certificate
from falaj.apps.supervisor import up
from falaj.apps.tls_listener import HANDSHAKE_S, MOST_HANDSHAKES
from falaj.assembly.config import read_config
from falaj.errors import ConfigInvalid, InvalidInput, Unavailable
from interfaces import ServedPlatform, serve
from polling import PATIENCE_S


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def served_by_tls(
    certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedPlatform]:
    toml = f'[server.tls]\ncertificate = "{certificate.pem}"\nkey = "{certificate.key}"'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_CA", str(certificate.pem))
        with serve(tmp_path_factory.mktemp("served"), toml=toml) as platform:
            yield platform


def shake_hands(served: ServedPlatform, certificate: Certificate, version: ssl.TLSVersion) -> str | None:
    context = ssl.create_default_context(cafile=certificate.pem)
    context.minimum_version = context.maximum_version = version
    where = urlsplit(served.url)
    with (
        socket.create_connection((where.hostname, where.port)) as plain,
        context.wrap_socket(plain, server_hostname=where.hostname) as secured,
    ):
        return secured.version()


@pytest.mark.slow
def test_tls_1_3_is_accepted(served_by_tls: ServedPlatform, certificate: Certificate) -> None:
    assert shake_hands(served_by_tls, certificate, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"


def test_tls_1_2_is_refused(served_by_tls: ServedPlatform, certificate: Certificate) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake_hands(served_by_tls, certificate, ssl.TLSVersion.TLSv1_2)


def test_handshakes_that_never_end_keep_nobody_out(
    served_by_tls: ServedPlatform, certificate: Certificate
) -> None:
    where = urlsplit(served_by_tls.url)
    silent = [socket.create_connection((where.hostname, where.port)) for _ in range(MOST_HANDSHAKES + 50)]
    try:
        assert shake_hands(served_by_tls, certificate, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        silent[0].settimeout(HANDSHAKE_S / 2)
        assert closed_by_peer(silent[0])  # the oldest made room
    finally:
        for each in silent:
            each.close()


def closed_by_peer(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.slow
def test_a_handshake_that_never_ends_is_cut_off(served_by_tls: ServedPlatform) -> None:
    where = urlsplit(served_by_tls.url)
    with socket.create_connection((where.hostname, where.port), timeout=6 * HANDSHAKE_S) as silent:
        silent.sendall(b"\x16\x03\x01")
        assert closed_by_peer(silent)


@pytest.mark.slow
def test_bytes_that_are_no_handshake_leave_nothing_behind(
    served_by_tls: ServedPlatform, certificate: Certificate
) -> None:
    where = urlsplit(served_by_tls.url)
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x01\x00", bytes(5000), b""):
        with socket.create_connection((where.hostname, where.port), timeout=PATIENCE_S) as stranger:
            stranger.sendall(sent)
            while sent and not closed_by_peer(stranger):
                pass

    assert shake_hands(served_by_tls, certificate, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"


def test_plain_http_is_refused(served_by_tls: ServedPlatform) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(served_by_tls.url.replace("https", "http") + "/healthz")


def test_the_client_trusts_the_configured_authority(served_by_tls: ServedPlatform) -> None:
    platform = served_by_tls.platform

    platform.put("secret", bytes(3_000_000))

    assert platform.get("secret") == bytes(3_000_000)
    assert platform.users.whoami().principal.kind == "user"


def test_the_client_trusts_no_other_authority(
    served_by_tls: ServedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FALAJ_CA")

    with (
        fj.connect(served_by_tls.url, served_by_tls.admin) as platform,
        pytest.raises(Unavailable, match="certificate"),
    ):
        platform.users.whoami()


def test_hsts_is_sent_with_tls(served_by_tls: ServedPlatform, certificate: Certificate) -> None:
    trust = ssl.create_default_context(cafile=certificate.pem)

    for path in ("/", "/healthz", "/nowhere", "/api/v1/users/whoami"):
        answer = httpx.get(served_by_tls.url + path, verify=trust)

        assert answer.headers["strict-transport-security"] == "max-age=31536000"


def test_hsts_is_not_sent_without_tls(served: ServedPlatform) -> None:
    assert "strict-transport-security" not in served.as_nobody.get("/healthz").headers


# ----------------------------------------------------------------------------------------- listening addresses


BEYOND = ["0.0.0.0", "::", "10.0.0.1", "192.168.1.5", "example.org", ""]


@pytest.mark.parametrize("bind", BEYOND)
def test_listening_beyond_loopback_without_tls_is_refused_by_the_configuration(
    tmp_path: Path, bind: str
) -> None:
    toml = tmp_path / "falaj.toml"
    toml.write_text(f'\n[server]\nbind = "{bind}"\n')

    with pytest.raises(ConfigInvalid) as caught:
        read_config(toml)

    assert f"{toml}:2 server" in str(caught.value)
    assert f"listening on {bind} without TLS is refused" in str(caught.value)


@pytest.mark.parametrize("bind", BEYOND)
def test_listening_beyond_loopback_without_tls_is_refused_by_up(
    tmp_path: Path, bind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))

    with pytest.raises(InvalidInput) as caught:
        up(tmp_path / "home", bind=bind, port=0)

    assert f"listening on {bind} without TLS is refused; set server.tls" in str(caught.value)


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_tls(tmp_path: Path, bind: str) -> None:
    toml = tmp_path / "falaj.toml"
    toml.write_text(f'[server]\nbind = "{bind}"\n')

    assert read_config(toml).server.bind == bind
