"""OpenTelemetry traces: which requests are traced, and their spans as a receiver reads them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as aio
from google.protobuf.json_format import ParseDict
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tritonclient.utils import InferenceServerException

from falaj.apps.model_server.process import trace_exporter
from falaj.apps.model_server.tracing import export
from falaj.apps.model_server.tracing.export import TraceExporter, encode_traces
from falaj.apps.model_server.tracing.spans import FinishedTrace, Tracer, TraceSpan, read_traceparent
from falaj.ports.egress import DeliveryFailed
from falaj.records.config import Config
from falaj.records.features import OnlineRow, OnlineRows
from falaj.records.serving.endpoints import Deployment
from falaj.records.serving.lookups import Lookup, ViewLookup
from falaj.serving.runtime.batch_queue import BatchQueue
from inference_clients import PROTOCOLS, GrpcClient, InferenceClient, connect, inputs_of
from model_servers import TOKEN, RawClient, RunningServer, constant, deployment, request, serving
from polling import eventually

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


class Collector:
    """Keeps finished traces."""

    def __init__(self) -> None:
        self.traces: list[FinishedTrace] = []

    def add(self, trace: FinishedTrace) -> None:
        self.traces.append(trace)


class Riders:
    def read(self, view: str, keys: list[str]) -> OnlineRows:
        rows = tuple(OnlineRow(key=key, event_time=datetime.now(UTC), values=(1.0, 2.0)) for key in keys)
        return OnlineRows(version=1, features=("age", "bags"), rows=rows)


def rows(**more: Any) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}
    return {"inputs": [tensor], **more}


@contextmanager
def traced(tmp_path: Path, *, share: float) -> Iterator[tuple[RunningServer, Collector]]:
    collector = Collector()
    path = constant(tmp_path / "m.onnx", 1)
    wanted = deployment(("m", "1", path), ("looked", "1", path))
    view = ViewLookup(view="riders", name="riders", keys=("rider",), features=("age", "bags"))
    looked = wanted.endpoints[1].model_copy(
        update={"lookup": Lookup(views=(view,), features=("age", "bags"))}
    )
    served = Deployment(models=wanted.models, endpoints=(wanted.endpoints[0], looked))
    tracer = Tracer(collector, share=share)
    with serving(served, tracer=tracer, features=Riders()) as running:
        yield running, collector


@contextmanager
def traced_client(
    tmp_path: Path, protocol: str, *, share: float
) -> Iterator[tuple[InferenceClient, Collector]]:
    with traced(tmp_path, share=share) as (running, collector):
        client = connect(protocol, running)
        yield client, collector
        client.close()


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def moments_of(trace: FinishedTrace) -> list[int]:
    return [trace.began, *(moment for part in trace.parts for moment in (part.began, part.ended))]


# --------------------------------------------------------------------------------------------- requests


def test_a_request_has_spans_of_queue_model_and_response(tmp_path: Path, protocol: str) -> None:
    with traced_client(tmp_path, protocol, share=1) as (client, collector):
        assert client.infer("m", rows())[0] == 200

    (trace,) = collector.traces
    assert (trace.endpoint, trace.version, trace.status, trace.parent) == ("m", "1", 200, None)
    assert [part.name for part in trace.parts] == ["queue", "model", "response"]
    moments = moments_of(trace)
    assert moments == sorted(moments)
    assert moments[-1] == trace.ended


def test_requests_that_repeat_a_head_or_run_as_one_batch_have_all_spans(tmp_path: Path) -> None:
    sent = request(body=json.dumps(rows()).encode())
    with traced(tmp_path, share=1) as (running, collector), RawClient(running.port) as client:
        for _ in range(3):
            client.ask(sent)
        client.send(sent * 4)
        answers = [client.answer()[0] for _ in range(4)]

    assert answers == [200] * 4
    assert len(collector.traces) == 7
    for trace in collector.traces:
        moments = moments_of(trace)
        assert [part.name for part in trace.parts] == ["queue", "model", "response"]
        assert (trace.version, moments) == ("1", sorted(moments))


def test_calls_of_grpc_that_repeat_a_message_or_run_as_one_batch_have_all_spans(tmp_path: Path) -> None:
    with traced(tmp_path, share=1) as (running, collector):
        asyncio.run(_calls_at_once(running, 3, 1))
        asyncio.run(_calls_at_once(running, 1, 20))

    assert len(collector.traces) == 23
    for trace in collector.traces:
        moments = moments_of(trace)
        assert [part.name for part in trace.parts] == ["queue", "model", "response"]
        assert (trace.version, trace.status, moments) == ("1", 200, sorted(moments))


async def _calls_at_once(running: RunningServer, times: int, together: int) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with aio.InferenceServerClient(f"127.0.0.1:{running.grpc_port}") as client:
        for _ in range(times):
            calls = [client.infer("m", inputs_of(rows()), headers=headers) for _ in range(together)]
            await asyncio.gather(*calls)


def test_a_lookup_is_a_span(tmp_path: Path, protocol: str) -> None:
    tensor = {"name": "rider", "shape": [1], "datatype": "BYTES", "data": ["a"]}

    with traced_client(tmp_path, protocol, share=1) as (client, collector):
        assert client.infer("looked", {"inputs": [tensor]})[0] == 200

    assert [part.name for part in collector.traces[0].parts] == ["lookup", "queue", "model", "response"]


def test_a_refused_request_is_traced_as_an_error(tmp_path: Path, protocol: str) -> None:
    wrong = {"inputs": [{"name": "z", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}

    with traced_client(tmp_path, protocol, share=1) as (client, collector):
        assert client.infer("m", wrong)[0] == 400

    assert [(trace.status, trace.parts) for trace in collector.traces] == [(400, ())]


def test_a_body_that_cannot_be_parsed_is_traced_as_an_error(tmp_path: Path) -> None:
    with traced(tmp_path, share=1) as (running, collector), RawClient(running.port) as client:
        client.ask(request(body=b"{"))

    assert [(trace.status, trace.parts) for trace in collector.traces] == [(400, ())]


def test_a_traceparent_decides_and_its_trace_goes_on(tmp_path: Path, protocol: str) -> None:
    with traced_client(tmp_path, protocol, share=0) as (client, collector):
        client.infer("m", rows())
        client.infer("m", rows(), Traceparent=PARENT)
        client.infer("m", rows(), Traceparent=PARENT[:-1] + "0")

    (trace,) = collector.traces
    assert (trace.trace, trace.parent) == (TRACE, SPAN)


def test_each_message_of_a_stream_is_a_span_of_the_trace_in_its_metadata(tmp_path: Path) -> None:
    wrong = {"inputs": [{"name": "z", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}

    with traced(tmp_path, share=0) as (running, collector):
        client = GrpcClient(running)
        client.stream("m", [rows(), wrong, rows()], Traceparent=PARENT)
        client.stream("m", [rows()])
        client.close()

    assert {(trace.trace, trace.parent) for trace in collector.traces} == {(TRACE, SPAN)}
    assert sorted(trace.status for trace in collector.traces) == [200, 200, 400]
    assert len({trace.span for trace in collector.traces}) == 3
    done = [trace for trace in collector.traces if trace.status == 200]
    assert all([part.name for part in trace.parts] == ["queue", "model", "response"] for trace in done)


def test_a_call_that_ends_without_an_answer_is_traced_as_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchQueue, "submit", lambda queue, queued: None)  # nothing is ever run

    with traced(tmp_path, share=1) as (running, collector):
        client = triton.InferenceServerClient(f"127.0.0.1:{running.grpc_port}")
        with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
            client.infer(
                "m", inputs_of(rows()), headers={"authorization": f"Bearer {TOKEN}"}, client_timeout=0.3
            )
        eventually(lambda: collector.traces)
        client.close()

    ((status, parts),) = [(trace.status, trace.parts) for trace in collector.traces]
    assert (status in (499, 504), parts) == (True, ())  # the client or the server notes the deadline first


def test_a_share_of_the_requests_is_traced() -> None:
    collector, chances = Collector(), iter([0.5, 0.05, 0.2])
    tracer = Tracer(collector, share=0.1, chance=lambda: next(chances))

    taken = [tracer.start("m", 0.0, None) is not None for _ in range(3)]

    assert taken == [False, True, False]


@pytest.mark.parametrize(
    "header",
    [
        *(None, b"", b"x", PARENT.encode()[:-1], PARENT.upper().encode()),
        *(f"ff-{TRACE}-{SPAN}-01".encode(), f"00-{'0' * 32}-{SPAN}-01".encode()),
        *(f"00-{TRACE}-{'0' * 16}-01".encode(), PARENT.encode() + b"-more", b"0" * 100_000),
    ],
)
def test_a_traceparent_that_is_not_valid_is_none(header: bytes | None) -> None:
    assert read_traceparent(header) is None


@given(st.binary(max_size=80))
def test_any_traceparent_is_read_or_left(header: bytes) -> None:
    found = read_traceparent(header)

    assert found is None or len(found.trace) == 32


# ------------------------------------------------------------------------------------------------ export


def finished(status: int = 200) -> FinishedTrace:
    parts = (TraceSpan("queue", 100, 200), TraceSpan("model", 200, 900))
    return FinishedTrace(TRACE, SPAN, "b7ad6b7169203331", "m", "1", status, 50, 1000, parts)


def read(sent: bytes) -> ExportTraceServiceRequest:
    """Parse a request as a receiver does: OTLP has ids in hexadecimal where other JSON of protobuf has base64."""
    document = json.loads(sent)
    for resource in document["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in span:
                        span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    return ParseDict(document, ExportTraceServiceRequest())


def test_a_receiver_reads_the_traces() -> None:
    found = read(encode_traces([finished(), finished(503)], replica="2", offset_ns=10**18))

    (resource,) = found.resource_spans
    facts = {each.key: each.value.string_value for each in resource.resource.attributes}
    spans = resource.scope_spans[0].spans
    assert (facts["service.name"], facts["service.instance.id"]) == ("falaj-model-server", "2")
    assert [span.name for span in spans] == ["infer m", "queue", "model"] * 2
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert (spans[0].span_id.hex(), spans[1].parent_span_id.hex()) == (SPAN, SPAN)
    assert (spans[0].kind, spans[1].kind) == (2, 1)
    assert spans[2].end_time_unix_nano - spans[2].start_time_unix_nano == 700
    assert spans[0].start_time_unix_nano == 10**18 + 50
    assert (spans[0].status.code, spans[3].status.code) == (1, 2)
    assert spans[3].attributes[2].value.int_value == 503


def test_traces_wait_in_a_bounded_buffer_and_failures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_WAITING", 3)
    answers: list[int | None] = [204, None, 500]

    def send(_: bytes) -> int:
        answer = answers.pop(0)
        if answer is None:
            raise DeliveryFailed("nobody listens")
        return answer

    exporter = TraceExporter(send)
    for _ in range(5):
        exporter.add(finished())
    exporter.flush()
    for _ in range(2):
        exporter.add(finished())
        exporter.flush()

    assert exporter.outcomes == {"dropped": 2, "sent": 3, "failed": 2}


@contextmanager
def receiver() -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    got: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return None

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, got
        finally:
            server.shutdown()
            thread.join()


def config(url: str, *allow: str) -> Config:
    return Config.model_validate({"serving": {"tracing": {"endpoint": url}}, "egress": {"allow": allow}})


def test_traces_are_sent_where_the_operator_says() -> None:
    with receiver() as (port, got):
        exporter = trace_exporter(config(f"http://127.0.0.1:{port}/v1/traces", "127.0.0.0/8"))
        assert exporter is not None
        exporter.start()
        exporter.add(finished())
        exporter.stop()

    ((path, sent),) = got
    assert (path, exporter.outcomes) == ("/v1/traces", {"sent": 1})
    assert len(read(sent).resource_spans[0].scope_spans[0].spans) == 3


def test_nothing_is_sent_unless_it_is_configured_and_allowed() -> None:
    assert trace_exporter(Config()) is None
    for url in ("https://otel.example.com/v1/traces", "http://127.0.0.1:4318/v1/traces"):
        with pytest.raises(ValueError, match=r"serving.tracing.endpoint: .* is not in egress\.allow"):
            config(url, "other.example.com", "10.0.0.0/8", "127.0.0.1:9999")
    assert config("https://otel.example.com:4318/x", "otel.example.com").serving.tracing.endpoint
