"""Requests that repeat the head or the body of the one before are answered, and refused, like any other."""

from __future__ import annotations

import gc
import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.apps.model_server.http.exchange import HttpExchange
from falaj.apps.model_server.http.repeated_heads import kept_head
from falaj.apps.model_server.inference.prediction import Prediction
from falaj.apps.model_server.limits import ServerLimits
from model_servers import OTHER_TOKEN, TOKEN, RawClient, RunningServer, deployment, mlp, request, serving

Answer = tuple[int, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    mlp(folder / "m.onnx", widths=(2, 1))
    mlp(folder / "n.onnx", widths=(2, 1), seed=1)
    limits = ServerLimits(body_bytes=100_000, held_bytes=400_000)
    wanted = deployment(("m", "1", folder / "m.onnx"), ("n", "1", folder / "n.onnx"))
    with serving(wanted, limits=limits) as running:
        yield running


def body(*values: float, **fields: Any) -> bytes:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": list(values), **fields}
    return json.dumps({"inputs": [tensor]}).encode()


def binary(*values: float, name: str = "x") -> bytes:
    """Return a whole request with a binary tensor."""
    raw = struct.pack(f"<{len(values)}f", *values)
    tensor = {"name": name, "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": False}}).encode()
    return request(body=head + raw, Inference_Header_Content_Length=str(len(head)))


def alone(server: RunningServer, sent: bytes) -> Answer:
    """Return the answer on a connection of its own."""
    with RawClient(server.port) as client:
        return answered(client, sent)


def answered(client: RawClient, sent: bytes) -> Answer:
    status, _, content = client.ask(sent)
    answer = json.loads(content)
    return status, answer.get("outputs") or answer


VALUES = st.floats(-1e3, 1e3, width=32)
ODD_BODIES = [
    b'{"inputs":[{"data":[1,2],"shape":[1,2],"name":"x","datatype":"FP32"}]}',
    b'{"inputs":[{"shape":[1,2],"data":[1,2],"name":"x","datatype":"FP32"}]}',
    b'{"inputs":[{"data":[9,9],"shape":[1,2],"data":[1,2],"name":"x","datatype":"FP32"}]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[[1,2]]}]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2,3]}]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2],"data":[3,4]}]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,"2"]}]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1e39,2]}]}',
    b'{"inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[1,2,3,4]}]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":]}]}',
    b'{"inputs":[{"name":"x[0.5]","shape":[1,2],"datatype":"FP32","data":[0.5,1]}]}',
    b'{"id":"[1, 2]","inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1, 2]}]}',
    b"{}",
    b"",
]
BODIES = st.one_of(st.builds(body, VALUES, VALUES), st.sampled_from(ODD_BODIES))
REQUESTS = st.one_of(
    st.builds(lambda content: request(body=content), BODIES),
    st.builds(lambda content: request(path="/v2/models/n/infer", body=content), BODIES),
    st.builds(lambda content: request(body=content, token=OTHER_TOKEN), BODIES),
    st.builds(lambda content: request(body=content, X_Other="1"), BODIES),
    st.builds(binary, VALUES, VALUES),
    st.just(binary(1, 2, name="y")),
    st.just(request("GET", "/v2/models/m")),
)


def without_ids(answer: Answer) -> Answer:
    status, content = answer
    return status, {k: v for k, v in content.items() if k != "id"} if isinstance(content, dict) else content


@settings(max_examples=40, deadline=None)
@given(st.lists(REQUESTS, min_size=2, max_size=8))
def test_each_request_of_a_connection_is_answered_as_on_its_own(
    server: RunningServer, sent: list[bytes]
) -> None:
    with RawClient(server.port) as client:
        found = [without_ids(answered(client, each)) for each in sent]

    assert found == [without_ids(alone(server, each)) for each in sent]
    assert server.server.metrics.held_bytes == 0


def test_repeated_requests_have_their_own_values(server: RunningServer) -> None:
    rows = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    with RawClient(server.port) as client:
        texts = [answered(client, request(body=body(*map(float, row))))[1][0]["data"] for row in rows]
        bytes_ = [answered(client, binary(*map(float, row)))[1][0]["data"] for row in rows]

    assert texts == bytes_
    assert len({str(text) for text in texts}) == len(rows)


def test_requests_leave_nothing_to_the_garbage_collector(server: RunningServer) -> None:
    """A request that refers to itself would stay until the collector runs, which then stops the event loop."""
    with RawClient(server.port) as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                client.ask(request(body=body(1, 2)))
                client.ask(request(body=ODD_BODIES[0]))
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [found for found in gc.garbage if isinstance(found, HttpExchange | Prediction)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    assert not left


@pytest.mark.parametrize(
    ("follows", "status"),
    [
        (request(body=body(1, 2), token="fj_token_9.unknown"), 401),
        (request(body=body(1, 2), token=None), 401),
        (request(body=body(1, 2), Content_Encoding="br"), 415),
        (request(body=b"x" * 100_001), 413),
        (request(body=body(1, 2)).replace(b"Host: test\r\n", b""), 400),
        (request(body=body(1, 2)).replace(b"Host: test\r\n", b"Host: test\r\nHost: test\r\n"), 400),
        (request(body=body(1, 2)).replace(b"HTTP/1.1", b"HTTP/3.1"), 505),
        (request(body=b"", Content_Length="+5"), 400),
        (request(body=b"", Content_Length="5, 5"), 400),
        (request(body=body(1, 2)).replace(b"Content-Length", b"Content-Length: 2\r\nContent-Length"), 400),
    ],
)
def test_what_differs_from_the_request_before_is_refused_as_ever(
    server: RunningServer, follows: bytes, status: int
) -> None:
    with RawClient(server.port) as client:
        for _ in range(3):
            assert client.ask(request(body=body(1, 2)))[0] == 200

        assert client.ask(follows)[0] == status


def test_a_repeated_head_in_pieces_and_two_at_once_are_answered(server: RunningServer) -> None:
    sent = request(body=body(1, 2))
    with RawClient(server.port) as client:
        client.ask(sent)
        client.ask(sent)
        for cut in (1, 10, len(sent) // 2, len(sent) - 1):
            client.send(sent[:cut])
            client.send(sent[cut:] + sent)
            assert [client.answer()[0], client.answer()[0]] == [200, 200]


def test_a_body_that_looks_like_the_next_head_is_a_body(server: RunningServer) -> None:
    """Bytes after a head that ends in another way than by an empty line must not become part of what is kept."""
    hidden = request("GET", "/v2/models/forbidden")
    with RawClient(server.port) as client:
        client.ask(request(body=body(1, 2)))
        client.ask(request(body=body(1, 2)))

        client.send(request(body=hidden) + request(body=body(1, 2)))

        assert [client.answer()[0], client.answer()[0]] == [400, 200]


@given(
    st.binary(max_size=40),
    st.sampled_from([b"\r\n\r\n", b"\n\n", b"\r\n\n", b"\n\r\n"]),
    st.integers(0, 60),
)
def test_a_head_is_kept_only_if_the_rest_is_exactly_its_body(content: bytes, end: bytes, size: int) -> None:
    data = b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: %d%b%b" % (size, end, content)

    head = kept_head(data, b"POST", b"/p", b"/p", {}, TOKEN)

    if head is not None:
        assert head.body_of(data) == data[len(data) - size :]
        assert data.index(b"\r\n\r\n") + 4 + size == len(data)
