"""Triton as an engine: connections, tokens, TLS and deadlines, against our own model server, a server of its protocol.

tests/frameworks/test_triton_server.py has a real Triton behind an endpoint.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import ValidationError

from certificates import make_certificate
from cutting_proxy import cutting_proxy
from falaj.apps.model_server.platform.remote_engine import RemoteEngines
from falaj.assembly.compute import secret_files
from falaj.drivers.egress.http import HttpEgress
from falaj.errors import ConfigInvalid, InvalidInput, ResidencyDenied, Unavailable
from falaj.governance import objects
from falaj.ports.egress import EgressAnswer
from falaj.records.control.tls import Tls
from falaj.records.governance.residency import Label
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.settings import ServingSettings
from falaj.records.serving.triton import TritonConfig
from falaj.serving.runtime.engines.opened import probed
from falaj.serving.runtime.engines.triton import open_remote
from model_servers import TOKEN, constant, deployment, serving, serving_platform, tabular
from platforms import make_platform
from polling import PATIENCE_S, eventually, let_pass

FILE = ServedFile(model="m", version="1")


@contextmanager
def asking(url: str, *, token: str = TOKEN, **options: Any) -> Iterator[Any]:
    """Yield what sends requests to a server with a token."""
    within_s, limit_bytes = options.pop("within_s", PATIENCE_S), options.pop("limit_bytes", 2**20)
    egress = HttpEgress(["127.0.0.0/8"])
    client = egress.connect(url, headers={"Authorization": f"Bearer {token}"}, **options)
    try:
        yield lambda method, path, headers, body: client.ask(
            method, path, headers=headers, body=body, within_s=within_s, limit_bytes=limit_bytes
        )
    finally:
        client.close()


def test_tensors_travel_to_triton_and_back(tmp_path: Path) -> None:
    with (
        serving(deployment(("m", "1", tabular(tmp_path / "m.onnx")))) as server,
        asking(f"http://127.0.0.1:{server.port}") as ask,
    ):
        engine = probed(FILE, open_remote(FILE, ask))

        score, high = engine.run([np.array([1.5, 9.0]), np.array([1, 4])])

        assert score.tolist() == [4.0, 22.0]
        assert high.tolist() == [False, True]
        assert [tensor.name for tensor in engine.model.inputs] == ["amount", "category"]
        assert not engine.cost.inline
        with pytest.raises(InvalidInput, match="Triton refused the values for m@1"):
            engine.run([np.array([1.5]), np.array([1, 4, 5])])


def test_connections_are_kept_and_no_more_than_allowed(tmp_path: Path) -> None:
    content = constant(tmp_path / "m.onnx", 7)
    with (
        serving(deployment(("m", "1", content))) as server,
        cutting_proxy(f"http://127.0.0.1:{server.port}", ()) as proxy,
        asking(proxy.url, most=3) as ask,
    ):
        engine = open_remote(FILE, ask)
        for _ in range(20):
            engine.run([np.ones((1, 2), np.float32)])
        alone = proxy.connections
        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(lambda _: engine.run([np.ones((2, 2), np.float32)]), range(200)))

        assert alone == 1
        assert 1 <= proxy.connections <= 3
        assert all(outputs[0].tolist() == [[7.0], [7.0]] for outputs in answers)


@pytest.mark.parametrize("cut", [0, 20, 150])
def test_a_kept_connection_that_is_cut_is_opened_again(tmp_path: Path, cut: int) -> None:
    """A server that was started again closes what was kept; an answer that was cut off is no answer."""
    with (
        serving(deployment(("m", "1", constant(tmp_path / "m.onnx", 7)))) as server,
        cutting_proxy(f"http://127.0.0.1:{server.port}", (10_000, cut)) as proxy,
        asking(proxy.url) as ask,
    ):
        engine = open_remote(FILE, ask)
        found, errors = 0, []
        for _ in range(60):  # the first connection is cut after 10,000 bytes, the second one after `cut`
            try:
                assert engine.run([np.ones((1, 2), np.float32)])[0].tolist() == [[7.0]]
                found += 1
            except Unavailable as error:
                errors.append(str(error))

        assert proxy.connections >= 3
        assert found >= 57
        assert [each for each in errors if "Triton did not answer for m@1" not in each] == []


def test_a_server_that_is_away_is_told_and_one_that_is_back_is_used(tmp_path: Path) -> None:
    content = constant(tmp_path / "m.onnx", 7)
    given = [np.ones((1, 2), np.float32)]
    with ExitStack() as opened:
        with serving(deployment(("m", "1", content))) as server:
            port = server.port
            ask = opened.enter_context(asking(f"http://127.0.0.1:{port}"))
            engine = open_remote(FILE, ask)
            engine.run(given)
        with pytest.raises(Unavailable, match=r"Triton did not answer for m@1: 127.0.0.1:\d+"):
            engine.run(given)
        with (
            serving(deployment(("m", "1", content))) as again,
            cutting_proxy(f"http://127.0.0.1:{again.port}", (), port=port),
        ):
            assert engine.run(given)[0].tolist() == [[7.0]]


def test_a_server_that_drips_is_left_at_the_deadline() -> None:
    def drip(client: socket.socket) -> None:
        with client, suppress(OSError):
            client.recv(4096)
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while True:
                client.sendall(b"x")
                let_pass(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: drip(listener.accept()[0]))
        thread.start()
        with (
            asking(f"http://127.0.0.1:{listener.getsockname()[1]}", within_s=0.4) as ask,
            pytest.raises(Unavailable, match=r"127.0.0.1:\d+ did not answer within 0.4 s"),
        ):
            open_remote(FILE, ask)
        thread.join(PATIENCE_S)

    assert not thread.is_alive()


def test_a_server_whose_authority_is_given_is_asked_by_tls(tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    tls = Tls(certificate=made.pem, key=made.key)
    wanted = deployment(("m", "1", constant(tmp_path / "m.onnx", 7)))
    with serving(wanted, tls=tls) as server:
        url = f"https://127.0.0.1:{server.port}"
        with asking(url, ca=made.pem) as ask:
            engine = open_remote(FILE, ask)
            answers = [engine.run([np.ones((1, 2), np.float32)]) for _ in range(3)]
        with (
            asking(url) as ask,
            pytest.raises(Unavailable, match=r"the certificate of 127.0.0.1 is not valid"),
        ):
            open_remote(FILE, ask)
        (tmp_path / "empty.pem").write_text("no certificate")
        for wrong in ("empty.pem", "missing.pem"):
            with pytest.raises(InvalidInput) as refused, asking(url, ca=tmp_path / wrong):
                pass
            assert "a readable PEM file with certificates" in str(refused.value)

    assert [each[0].tolist() for each in answers] == [[[7.0]]] * 3


def test_a_version_that_triton_does_not_have_is_told(tmp_path: Path) -> None:
    with serving(deployment(("m", "1", tabular(tmp_path / "m.onnx")))) as server:
        with asking(f"http://127.0.0.1:{server.port}") as ask:
            with pytest.raises(Unavailable, match=r"Triton does not serve other@1 \(404\)"):
                open_remote(FILE.model_copy(update={"model": "other"}), ask)
            with pytest.raises(Unavailable, match=r"Triton does not serve acme/m@1 \(404\)"):
                open_remote(FILE.model_copy(update={"model": "acme/m"}), ask)
        with (
            asking(f"http://127.0.0.1:{server.port}", token="wrong") as ask,
            pytest.raises(Unavailable, match=r"Triton refuses requests for m@1 \(401\)"),
        ):
            open_remote(FILE, ask)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (
            b'{"outputs":[{"name":"y","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":4}}]}',
            b"1234",
        ),
        (
            b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":99}}]}',
            b"1234",
        ),
        (
            b'{"outputs":[{"name":"y","datatype":"FP32","shape":[-1],"parameters":{"binary_data_size":4}}]}',
            b"1234",
        ),
        (
            b'{"outputs":[{"name":"y","datatype":"WORDS","shape":[1],"parameters":{"binary_data_size":4}}]}',
            b"1234",
        ),
        (b'{"outputs":[]}', b""),
        (b"\xff not json", b""),
    ],
)
def test_an_answer_that_lies_about_its_bytes_is_refused(head: bytes, body: bytes) -> None:
    described = (
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[-1]}],"outputs":'
        b'[{"name":"y","datatype":"FP32","shape":[-1]}]}'
    )

    def ask(method: str, *_: object) -> EgressAnswer:
        if method == "GET":
            return EgressAnswer(200, {}, described)
        return EgressAnswer(200, {"inference-header-content-length": str(len(head))}, head + body)

    opened = open_remote(FILE, ask)

    with pytest.raises(Unavailable, match="in words that are not known"):
        opened.run([np.zeros(1, np.float32)])


TOML = """
[serving.triton]
url = "{url}"
zone = "{zone}"
token = "file:{token}"
connections = 2
[serving.triton.headers]
x-tenant = "env:TRITON_TENANT"
[egress]
allow = ["127.0.0.0/8"]
[zones.local]
jurisdiction = "AE"
[zones.abroad]
jurisdiction = "DE"
"""


def secret_file(folder: Path, value: str) -> Path:
    path = folder / "triton.token"
    path.touch(mode=0o600)
    path.write_text(value + "\n")
    return path


def test_an_endpoint_forwards_to_the_server_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = constant(tmp_path / "m.onnx", 7).read_bytes()
    token_file = secret_file(tmp_path, TOKEN)
    monkeypatch.setenv("TRITON_TENANT", "risk-department")
    with (
        serving(deployment(("m", "1", tmp_path / "m.onnx"))) as server,
        cutting_proxy(f"http://127.0.0.1:{server.port}", ()) as proxy,
        make_platform(
            tmp_path / "near", toml=TOML.format(url=proxy.url, zone="local", token=token_file)
        ) as made,
    ):
        made.models.register("m", files=(made.blobs.upload(iter([content])).id,), paths=("model.onnx",))
        token = made.tokens.issue(purpose="test").secret
        with serving_platform(made.parts):
            made.endpoints.deploy("sevens", model="m@1")
            made.endpoints.configure("sevens", engine="triton")

            def places() -> set[str]:
                return {each.place for each in made.endpoints.show("sevens").measured}

            eventually(lambda: places() == {"threads"})
            tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
            answer = httpx.post(
                f"{made.endpoints.show('sevens').url}/infer",
                json={"inputs": [tensor]},
                headers={"Authorization": f"Bearer {token}"},
            )

            assert answer.json()["outputs"][0]["data"] == [7.0]
        assert b"x-tenant: risk-department" in bytes(proxy.sent)
        assert token_file in secret_files(made.parts.config)


def test_a_token_is_in_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may repeat what it was sent, and a secret may be no header."""
    monkeypatch.setenv("TRITON_TENANT", "risk-department")
    token_file = secret_file(tmp_path, "very-secret")

    def repeat(client: socket.socket) -> None:
        with client:
            sent = client.recv(4096)
            client.sendall(
                b"HTTP/1.1 500 No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(sent), sent)
            )

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: repeat(listener.accept()[0]))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with make_platform(
            tmp_path / "home", toml=TOML.format(url=url, zone="local", token=token_file)
        ) as made:
            with pytest.raises(Unavailable) as repeated:
                RemoteEngines(made.parts.config, made.parts.gate.zones).load(FILE)
            thread.join(PATIENCE_S)
            token_file.write_text("two\nlines of very-secret")
            with pytest.raises(ConfigInvalid) as no_header:
                RemoteEngines(made.parts.config, made.parts.gate.zones).load(FILE)
            monkeypatch.delenv("TRITON_TENANT")
            with pytest.raises(ConfigInvalid, match=r"serving\.triton\.headers\.x-tenant"):
                RemoteEngines(made.parts.config, made.parts.gate.zones).load(FILE)

    assert "Bearer ***" in str(repeated.value)
    for raised in (repeated, no_header):
        assert "very-secret" not in str(raised.value)
        assert "risk-department" not in str(raised.value)


@pytest.mark.parametrize(
    "headers", [{"Authorization": "env:A"}, {"content-length": "env:A"}, {"x-a": "env:A", "X-A": "env:B"}]
)
def test_headers_that_falaj_sends_itself_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="a header is given once, and not one that Falaj sends itself"):
        TritonConfig.model_validate({"url": "https://t", "token": "env:T", "headers": headers})


def test_data_that_may_not_leave_is_not_sent_to_a_server_abroad(tmp_path: Path) -> None:
    toml = '[serving.triton]\nurl = "https://triton.example.com"\nzone = "abroad"\n'
    zones = '[zones.local]\njurisdiction = "AE"\n[zones.abroad]\njurisdiction = "DE"\n'
    with make_platform(tmp_path / "home", toml=toml + zones) as made:
        content = constant(tmp_path / "m.onnx", 7).read_bytes()
        made.models.register("m", files=(made.blobs.upload(iter([content])).id,), paths=("model.onnx",))
        served = made.endpoints.deploy("sevens", model="m@1")
        remote = RemoteEngines(made.parts.config, made.parts.gate.zones)
        with made.parts.database.read() as tx:
            version = objects.by_id(tx, served.routes[0].id)
        assert version is not None
        bound = version.model_copy(update={"label": Label(only=frozenset({"AE"}))})

        remote.require_permitted(bound, served)  # it runs here
        asked = served.model_copy(update={"settings": ServingSettings(engine="triton")})
        remote.require_permitted(version, asked)
        with pytest.raises(ResidencyDenied, match=r"Triton runs in zone abroad \(DE\)"):
            remote.require_permitted(bound, asked)
        with pytest.raises(InvalidInput) as refused:
            remote.load(FILE)
        assert "a host in egress.allow" in str(refused.value)
