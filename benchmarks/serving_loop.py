"""CPU of the model server's event loop a request, by connections without sockets: what is left is our own code.

Each turn gives every connection one request, as at concurrency 64, and lets the loop answer them as batches. These
figures leave out system calls, so they show what a change of the code does, and stay steady on a busy machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any, cast

import hpack
import numpy as np
import uvloop
from tritonclient.grpc import service_pb2

from falaj.apps.model_server.grpc.connection import GrpcConnection
from falaj.apps.model_server.grpc.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from falaj.apps.model_server.grpc.headers import OK
from falaj.apps.model_server.http.connection import Connection
from falaj.apps.model_server.platform.recorder import PredictionRecorder, PredictionSource
from falaj.apps.model_server.process import tune_interpreter
from falaj.apps.model_server.server import ModelServer
from falaj.records.serving.endpoints import Deployment, Endpoint, Route, ServedFile
from harness import Result, Rule, report, say
from peers.http_load import infer_request
from serving_rest import save_model_a

CONNECTIONS = 64
TURNS = 300
ROUNDS = 9
BEFORE = 22.5
"""µs before heads and bodies were recognized, on the same machine."""
TOKEN = "0123456789abcdef0123456789abcdef"
HEAD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelInfer"),
    (":authority", "127.0.0.1:8000"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("authorization", f"Bearer {TOKEN}"),
]


class AdmitsOne:
    """Admission with the work of the hot path: a decision in memory, a counted call and the digest of its body."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digest = hashlib.sha256()
        self._known = {TOKEN: "user"}
        self.count = 0

    def recognize(self, credential: str) -> str | None:
        return self._known.get(credential)

    def authenticate(self, credential: str) -> str:
        return self._known[credential]

    def admit(self, credential: str, endpoint: str | None, data: bytes, *, calls: int = 1) -> str | None:
        with self._lock:
            self.count += calls
            self._digest.update(data)
        return self._known[credential]

    def decide(self, credential: str, endpoint: str | None) -> None:
        return None


class CountingTransport:
    """A transport that counts the responses."""

    def __init__(self) -> None:
        self.written = 0
        self.last = b""

    def write(self, data: bytes) -> None:
        self.written += 1
        self.last = data

    def get_extra_info(self, name: str) -> Any:
        return None

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class ReadsAll:
    """A process that reads what the log would be sent."""

    def __init__(self, connection: socket.socket) -> None:
        with connection:
            self._process = subprocess.Popen(["cat"], stdin=connection, stdout=subprocess.DEVNULL)

    def wait(self, timeout_s: float) -> bool:
        return self._process.wait(timeout_s) is not None

    def kill(self) -> None:
        self._process.kill()


def main() -> None:
    plain, logged = uvloop.run(measure()), uvloop.run(measure(logs=True))
    grpc, grpc_logged = uvloop.run(measure(GrpcRequests)), uvloop.run(measure(GrpcRequests, logs=True))
    report(
        "serving_loop",
        [
            Result("event loop CPU µs a request", plain, BEFORE, 12, Rule.FALAJ_AT_MOST),
            Result("event loop CPU µs a request, logged", logged, plain, 1.2),
            Result("event loop CPU µs a request by gRPC, REST", grpc, plain, 1),
            Result("event loop CPU µs a request by gRPC, logged, REST", grpc_logged, logged, 1),
        ],
    )


class RestRequests:
    """The requests of a client with JSON."""

    def __init__(self, number: int) -> None:
        self._request = infer_request("/v2/models/a/infer", TOKEN, width=32, seed=number)

    def connect(self, server: ModelServer) -> asyncio.Protocol:
        return Connection(server)

    def turns(self) -> list[bytes]:
        """Return what the client sends in the turns of a round."""
        return [self._request] * TURNS

    def is_answered(self, answer: bytes) -> bool:
        return b"200 OK" in answer


class GrpcRequests:
    """The calls of a client of gRPC, each with a stream of its own."""

    def __init__(self, number: int) -> None:
        rows = np.random.default_rng(number).standard_normal((1, 32)).astype(np.float32)
        request = service_pb2.ModelInferRequest(model_name="a")
        request.inputs.add(name="x", datatype="FP32", shape=rows.shape)
        request.raw_input_contents.append(rows.tobytes())
        message = request.SerializeToString()
        self._data = struct.pack(">BL", 0, len(message)) + message
        self._encoder = hpack.Encoder()
        self._next = 1

    def connect(self, server: ModelServer) -> asyncio.Protocol:
        return GrpcConnection(server, server._grpc)

    def turns(self) -> list[bytes]:
        made = []
        for _ in range(TURNS):
            block, flags = self._encoder.encode(HEAD), END_HEADERS
            head = frame(HEADERS, flags, self._next, block)
            data = frame(DATA, END_STREAM, self._next, self._data)
            greeting = PREFACE + frame(SETTINGS, 0, 0) if self._next == 1 else b""
            window = frame(WINDOW_UPDATE, 0, 0, struct.pack(">L", 2**16))
            made.append(greeting + (window if self._next % 512 == 1 else b"") + head + data)
            self._next += 2
        return made

    def is_answered(self, answer: bytes) -> bool:
        return OK in answer


async def measure(kind: type[RestRequests | GrpcRequests] = RestRequests, *, logs: bool = False) -> float:
    recorder = PredictionRecorder(ReadsAll, every_s=5.0) if logs else None
    if recorder is not None:
        recorder.sources = {("a", "1"): PredictionSource("version", (), ())}
        recorder.start()
    with tempfile.TemporaryDirectory() as folder:
        model = save_model_a(Path(folder) / "a.onnx")
        server = ModelServer(AdmitsOne(), sink=recorder)
        file = ServedFile(
            model="a", version="1", path=model, sha256=hashlib.sha256(model.read_bytes()).hexdigest()
        )
        endpoint = Endpoint(name="a", model="a", routes=(Route(version="1", weight=1),))
        await server.apply(Deployment(models=(file,), endpoints=(endpoint,)))
    tune_interpreter()
    transports = [CountingTransport() for _ in range(CONNECTIONS)]
    clients = [kind(number) for number in range(CONNECTIONS)]
    connections = [client.connect(server) for client in clients]
    for connection, transport in zip(connections, transports, strict=True):
        connection.connection_made(cast(asyncio.Transport, transport))
    costs = [await _round(connections, [client.turns() for client in clients]) for _ in range(ROUNDS)]
    for client, transport in zip(clients, transports, strict=True):
        assert client.is_answered(transport.last)
    say(f"{kind.__name__}: {min(costs):.2f} µs a request at best, {median(costs):.2f} in the middle")
    if recorder is not None:
        await recorder.stop()
    return min(costs)


async def _round(connections: list[asyncio.Protocol], requests: list[list[bytes]]) -> float:
    turns = list(zip(*requests, strict=True))
    began = time.thread_time()
    for turn in turns:
        for connection, request in zip(connections, turn, strict=True):
            connection.data_received(request)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return (time.thread_time() - began) / (TURNS * len(connections)) * 1e6


if __name__ == "__main__":
    if "--profile" in sys.argv:
        import cProfile

        kind = "GrpcRequests" if "--grpc" in sys.argv else "RestRequests"
        cProfile.run(f"uvloop.run(measure({kind}, logs=True))", sort="tottime")
    else:
        main()
