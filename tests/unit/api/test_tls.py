"""TLS 1.3 or loopback: nothing else."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import falaj as fj
from falaj.apps.supervisor import up
from falaj.assembly.config import read_config
from falaj.errors import ConfigInvalid, InvalidInput, Unavailable
from falaj.records.record import utc_now
from interfaces import ServedPlatform, serve


@dataclass(frozen=True)
class Certificate:
    pem: Path
    key: Path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate for 127.0.0.1, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "falaj test")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(utc_now() - timedelta(days=1))
        .not_valid_after(utc_now() + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    found = Certificate(folder / "certificate.pem", folder / "key.pem")
    found.pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    found.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return found


@pytest.fixture(scope="module")
def served_by_tls(
    certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedPlatform]:
    toml = f'[server.tls]\ncertificate = "{certificate.pem}"\nkey = "{certificate.key}"'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_CA", str(certificate.pem))
        with serve(tmp_path_factory.mktemp("served"), toml=toml) as door:
            yield door


def shake_hands(served: ServedPlatform, certificate: Certificate, version: ssl.TLSVersion) -> str | None:
    context = ssl.create_default_context(cafile=certificate.pem)
    context.minimum_version = context.maximum_version = version
    where = urlsplit(served.url)
    with (
        socket.create_connection((where.hostname, where.port)) as plain,
        context.wrap_socket(plain, server_hostname=where.hostname) as secured,
    ):
        return secured.version()


def test_tls_1_3_is_spoken(served_by_tls: ServedPlatform, certificate: Certificate) -> None:
    assert shake_hands(served_by_tls, certificate, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"


def test_tls_1_2_is_refused(served_by_tls: ServedPlatform, certificate: Certificate) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake_hands(served_by_tls, certificate, ssl.TLSVersion.TLSv1_2)


def test_plain_http_is_refused(served_by_tls: ServedPlatform) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(served_by_tls.url.replace("https", "http") + "/healthz")


def test_the_client_trusts_the_authority_that_it_is_told(served_by_tls: ServedPlatform) -> None:
    platform = served_by_tls.platform

    platform.put("secret", bytes(3_000_000))

    assert platform.get("secret") == bytes(3_000_000)
    assert platform.users.whoami().principal.kind == "user"


def test_the_client_trusts_nobody_else(
    served_by_tls: ServedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FALAJ_CA")

    with (
        fj.connect(served_by_tls.url, served_by_tls.admin) as platform,
        pytest.raises(Unavailable, match="certificate"),
    ):
        platform.users.whoami()


def test_browsers_are_told_to_stay_with_tls(served_by_tls: ServedPlatform, certificate: Certificate) -> None:
    trust = ssl.create_default_context(cafile=certificate.pem)

    for path in ("/", "/healthz", "/nowhere", "/api/v1/users/whoami"):
        answer = httpx.get(served_by_tls.url + path, verify=trust)

        assert answer.headers["strict-transport-security"] == "max-age=31536000"


def test_without_tls_browsers_are_not_told_so(served: ServedPlatform) -> None:
    assert "strict-transport-security" not in served.as_nobody.get("/healthz").headers


# --------------------------------------------------------------------------------------------- where to listen


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
