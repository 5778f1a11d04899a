"""CPU of the model server's event loop a request, by connections without sockets: what is left is our own code.

Each turn gives every connection one request, as at concurrency 64, and lets the loop answer them as batches. These
figures leave out system calls, so they show what a change of the code does, and stay steady on a busy machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any, cast

import uvloop

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

    def admit(self, credential: str, endpoint: str | None, data: bytes) -> str | None:
        with self._lock:
            self.count += 1
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
    report(
        "serving_loop",
        [
            Result("event loop CPU µs a request", plain, BEFORE, 12, Rule.FALAJ_AT_MOST),
            Result("event loop CPU µs a request, logged", logged, plain, 1.2),
        ],
    )


async def measure(*, logs: bool = False) -> float:
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
    connections = []
    for transport in transports:
        connection = Connection(server)
        connection.connection_made(cast(asyncio.Transport, transport))
        connections.append(connection)
    requests = [infer_request("/v2/models/a/infer", TOKEN, width=32, seed=n) for n in range(CONNECTIONS)]
    costs = [await _round(connections, requests) for _ in range(ROUNDS)]
    assert all(b"200 OK" in transport.last for transport in transports)
    say(f"event loop: {min(costs):.2f} µs a request at best, {median(costs):.2f} in the middle")
    if recorder is not None:
        await recorder.stop()
    return min(costs)


async def _round(connections: list[Connection], requests: list[bytes]) -> float:
    began = time.thread_time()
    for _ in range(TURNS):
        for connection, request in zip(connections, requests, strict=True):
            connection.data_received(request)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return (time.thread_time() - began) / (TURNS * len(connections)) * 1e6


if __name__ == "__main__":
    if "--profile" in sys.argv:
        import cProfile

        cProfile.run("uvloop.run(measure(logs=True))", sort="tottime")
    else:
        main()
