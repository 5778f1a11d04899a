"""Triton as an engine. The stand-in for Triton is our own model server, which speaks the same protocol, behind a
small proxy that adds the token, since Triton asks for none."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from falaj.apps.model_server.platform.remote_engine import RemoteEngines
from falaj.drivers.egress.http import HttpEgress
from falaj.errors import InvalidInput, ResidencyDenied, Unavailable
from falaj.governance import objects
from falaj.ports.egress import EgressAnswer
from falaj.records.governance.residency import Label
from falaj.records.serving.endpoints import Deployment, ServedFile
from falaj.records.serving.settings import ServingSettings
from falaj.serving.runtime.engines.opened import probed
from falaj.serving.runtime.engines.triton import open_remote
from model_servers import TOKEN, constant, deployment, serving, serving_platform, tabular
from platforms import make_platform
from polling import eventually

FILE = ServedFile(model="m", version="1")


@contextmanager
def stand_in(wanted: Deployment) -> Iterator[str]:
    """Serve `wanted` at an address that needs no token."""
    with serving(wanted) as running:

        class Forward(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                inner = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
                headers = dict(self.headers) | {"Authorization": f"Bearer {TOKEN}"}
                inner.request(self.command, self.path, content, headers)
                answer = inner.getresponse()
                body = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "content-length"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                inner.close()

            do_GET = do_POST  # noqa: N815 - as http.server calls it

            def log_message(self, *_: object) -> None: ...

        with ThreadingHTTPServer(("127.0.0.1", 0), Forward) as proxy:
            thread = threading.Thread(target=proxy.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{proxy.server_address[1]}"
            finally:
                proxy.shutdown()
                thread.join()


def asking(url: str) -> Any:
    egress = HttpEgress(["127.0.0.0/8"])
    return lambda method, path, headers, body: egress.ask(
        method, url + path, headers=headers, body=body, within_s=5, limit_bytes=2**20
    )


def test_tensors_travel_to_triton_and_back(tmp_path: Path) -> None:
    with stand_in(deployment(("m", "1", tabular(tmp_path / "m.onnx")))) as url:
        engine = probed(FILE, open_remote(FILE, asking(url)))

        score, high = engine.run([np.array([1.5, 9.0]), np.array([1, 4])])

        assert score.tolist() == [4.0, 22.0]
        assert high.tolist() == [False, True]
        assert [tensor.name for tensor in engine.model.inputs] == ["amount", "category"]
        assert not engine.cost.inline
        with pytest.raises(InvalidInput, match="Triton refused the values for m@1"):
            engine.run([np.array([1.5]), np.array([1, 4, 5])])


def test_a_version_that_triton_does_not_have_is_told(tmp_path: Path) -> None:
    with stand_in(deployment(("m", "1", tabular(tmp_path / "m.onnx")))) as url:
        with pytest.raises(Unavailable, match=r"Triton does not serve other@1 \(404\)"):
            open_remote(FILE.model_copy(update={"model": "other"}), asking(url))
        with pytest.raises(Unavailable, match=r"Triton does not serve acme/m@1 \(404\)"):
            open_remote(FILE.model_copy(update={"model": "acme/m"}), asking(url))
    with pytest.raises(Unavailable, match="Triton did not answer for m@1"):
        open_remote(FILE, asking(url))


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


def test_an_endpoint_forwards_to_the_server_of_the_configuration(tmp_path: Path) -> None:
    content = constant(tmp_path / "m.onnx", 7).read_bytes()
    toml = '[serving.triton]\nurl = "{url}"\nzone = "{zone}"\n[egress]\nallow = ["127.0.0.0/8"]\n'
    zones = '[zones.local]\njurisdiction = "AE"\n[zones.abroad]\njurisdiction = "DE"\n'
    with (
        stand_in(deployment(("m", "1", tmp_path / "m.onnx"))) as url,
        make_platform(tmp_path / "near", toml=toml.format(url=url, zone="local") + zones) as made,
    ):
        made.models.register("m", files=(made.blobs.upload(iter([content])).id,), paths=("model.onnx",))
        token = made.tokens.issue(purpose="test").secret
        with serving_platform(made.parts):
            made.endpoints.deploy("sevens", model="m@1")
            made.endpoints.configure("sevens", engine="triton")

            def places() -> set[str]:
                return {each.place for each in made.endpoints.show("sevens").measured}

            eventually(lambda: places() == {"threads"}, within=30)
            tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
            answer = httpx.post(
                f"{made.endpoints.show('sevens').url}/infer",
                json={"inputs": [tensor]},
                headers={"Authorization": f"Bearer {token}"},
            )

            assert answer.json()["outputs"][0]["data"] == [7.0]


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
