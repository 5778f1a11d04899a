"""Compressed bodies in both directions: stock clients, bombs, damage, and what is not worth compressing."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import suppress

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import given
from hypothesis import strategies as st

from falaj.apps.model_server.http.compression import accepted_coding, compress, decompress
from falaj.apps.model_server.limits import ServerLimits
from falaj.errors import InvalidInput, TooLarge
from model_servers import TOKEN, RawClient, RunningServer, deployment, request, serving, widened
from polling import eventually

LIMITS = ServerLimits(body_bytes=1_000_000, held_bytes=8_000_000, sweep_s=0.05)
ONE = b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[1.5]}]}'


def headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    files = [("m", "1", widened(folder / "m.onnx", 2)), ("wide", "1", widened(folder / "w.onnx", 20_000))]
    with serving(deployment(*files), limits=LIMITS) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    with RawClient(server.port) as made:
        yield made


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", ["m", "wide"])
def test_the_stock_client_compresses_both_ways(
    server: RunningServer, coding: str, binary: bool, name: str
) -> None:
    tensor = triton.InferInput("x", [2, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[1.5], [2.5]], np.float32), binary_data=binary)
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        answer = client.infer(
            name,
            [tensor],
            outputs=[triton.InferRequestedOutput("y", binary_data=binary)],
            headers=headers(),
            request_compression_algorithm=coding,
            response_compression_algorithm=coding,
        )

    assert answer.as_numpy("y")[:, -1].tolist() == [1.5, 2.5]


def test_large_answers_are_compressed_for_those_who_ask(client: RawClient) -> None:
    sent = {"path": "/v2/models/wide/infer", "body": ONE}

    _, plain_headers, plain = client.ask(request(**sent))
    _, packed_headers, packed = client.ask(request(**sent, Accept_Encoding="br, gzip"))
    _, small_headers, _ = client.ask(request(body=ONE, Accept_Encoding="gzip"))

    assert "content-encoding" not in plain_headers
    assert (packed_headers["content-encoding"], packed_headers["vary"]) == ("gzip", "Accept-Encoding")
    assert json.loads(gzip.decompress(packed)) == json.loads(plain)
    assert len(packed) < len(plain) / 4
    assert "content-encoding" not in small_headers


def test_answers_keep_their_order_while_one_is_compressed(client: RawClient) -> None:
    wide = request(path="/v2/models/wide/infer", body=ONE, Accept_Encoding="gzip")
    client.send((wide + request(body=ONE, Accept_Encoding="gzip")) * 5)

    codings = [client.answer()[1].get("content-encoding") for _ in range(10)]

    assert codings == ["gzip", None] * 5


def test_http_clients_that_compress_by_default_work(server: RunningServer) -> None:
    answer = httpx.post(
        f"http://127.0.0.1:{server.port}/v2/models/wide/infer", content=ONE, headers=headers()
    )

    assert len(answer.json()["outputs"][0]["data"]) == 20_000


BOMB = gzip.compress(b" " * 50_000_000)
DAMAGED = {
    "bomb": (BOMB, 413, "decompressed body exceeds the limit of 1000000 bytes"),
    "not gzip": (ONE, 400, "not gzip"),
    "truncated": (gzip.compress(ONE)[:-9], 400, "truncated"),
    "wrong checksum": (gzip.compress(ONE)[:-5] + b"\0\0\0\0\0", 400, "not gzip"),
    "trailing bytes": (gzip.compress(ONE) + b"more", 400, "4 bytes follow"),
    "deflate": (zlib.compress(ONE), 400, "not gzip"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_bodies_are_refused_and_the_connection_stays(
    server: RunningServer, client: RawClient, what: str
) -> None:
    body, status, words = DAMAGED[what]

    found, _, answer = client.ask(request(body=body, Content_Encoding="gzip"))

    assert (found, words in json.loads(answer)["error"]) == (status, True), answer
    assert client.ask(request(body=gzip.compress(ONE), Content_Encoding="gzip"))[0] == 200
    eventually(lambda: server.server.metrics.held_bytes == 0)


def test_what_comes_out_counts_as_held_by_the_caller(client: RawClient, server: RunningServer) -> None:
    nearly = gzip.compress(ONE + b" " * 900_000)
    client.send(request(body=nearly, Content_Encoding="gzip") * 30)

    statuses = [client.answer()[0] for _ in range(30)]

    assert set(statuses) <= {200, 503}
    assert statuses[0] == 200
    eventually(lambda: server.server.metrics.held_bytes == 0)


def test_a_client_that_leaves_before_its_body_is_decompressed_harms_nobody(server: RunningServer) -> None:
    for _ in range(5):
        with RawClient(server.port) as client:
            client.send(request(body=gzip.compress(ONE + b" " * 900_000), Content_Encoding="gzip") * 3)

    eventually(lambda: not server.server.connections and server.server.metrics.held_bytes == 0)
    with RawClient(server.port) as client:
        assert client.ask(request(body=ONE))[0] == 200


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        (b"", b""),
        (b"gzip", b"gzip"),
        (b"GZIP, Deflate", b"gzip"),
        (b"deflate", b"deflate"),
        (b"gzip;q=0", b""),
        (b"gzip;q=0.2, deflate;q=0.9", b"deflate"),
        (b"*", b"gzip"),
        (b"*;q=0", b""),
        (b"gzip;q=0, *", b"deflate"),
        (b"identity", b""),
        (b"gzip;q=much", b""),
        (b"gzip;q=nan", b""),
        (b"gzip;q=1e9", b""),
        (b",;=,q", b""),
    ],
)
def test_the_accepted_coding(header: bytes, coding: bytes) -> None:
    assert accepted_coding(header) == coding


@given(st.binary(max_size=2000), st.sampled_from([b"gzip", b"deflate"]))
def test_what_is_compressed_comes_back(body: bytes, coding: bytes) -> None:
    assert decompress(compress(body, coding), coding, limit=len(body)) == body


@given(st.binary(max_size=400), st.sampled_from([b"gzip", b"deflate"]), st.integers(0, 300))
def test_any_bytes_are_refused_or_decompressed_within_the_limit(
    body: bytes, coding: bytes, limit: int
) -> None:
    with suppress(InvalidInput, TooLarge):
        assert len(decompress(body, coding, limit=limit)) <= limit


@given(st.binary(max_size=100))
def test_any_accept_encoding_is_understood(header: bytes) -> None:
    assert accepted_coding(header) in (b"", b"gzip", b"deflate")
