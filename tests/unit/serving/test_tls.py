"""The model server over TLS."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from certificates import Certificate, make_certificate
from falaj.apps.tls_listener import MOST_HANDSHAKES
from falaj.records.control.tls import Tls
from model_servers import RunningServer, constant, deployment, serving


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(certificate: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model: Path = constant(tmp_path_factory.mktemp("models") / "m.onnx", 7.0)
    tls = Tls(certificate=certificate.pem, key=certificate.key)
    with serving(deployment(("m", "1", model)), tls=tls) as running:
        yield running


def ready(server: RunningServer, certificate: Certificate) -> int:
    trust = ssl.create_default_context(cafile=certificate.pem)
    with httpx.Client(verify=trust, trust_env=False) as client:
        url = f"https://127.0.0.1:{server.port}/v2/health/ready"
        return [client.get(url).status_code for _ in range(3)][-1]


def test_requests_are_answered_over_one_connection(server: RunningServer, certificate: Certificate) -> None:
    assert ready(server, certificate) == 200


def test_plain_http_is_not_answered(server: RunningServer) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{server.port}/v2/health/ready", trust_env=False)


def test_handshakes_that_never_end_keep_nobody_out(server: RunningServer, certificate: Certificate) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MOST_HANDSHAKES + 20)]
    try:
        assert ready(server, certificate) == 200
    finally:
        for each in silent:
            each.close()
