"""A load generator: a number of connections, each with one request in flight."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import struct
import sys
import time

import uvloop


class Client(asyncio.Protocol):
    """Sends the next request when a response is complete; checks its status and length."""

    def __init__(self, request: bytes, times: list[float]) -> None:
        self._request = request
        self._times = times
        self._got = b""
        self._length = 0
        self.failures = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def data_received(self, data: bytes) -> None:
        got = self._got + data if self._got else data
        head = got.find(b"\r\n\r\n")
        if head < 0 or len(got) < head + 4 + self._body(got[:head]):
            self._got = got
            return
        self._got = b""
        self.failures += not got.startswith(b"HTTP/1.1 200")
        self._times.append(time.perf_counter() - self._began)
        self._send()

    def _send(self) -> None:
        self._began = time.perf_counter()
        self._transport.write(self._request)

    def _body(self, head: bytes) -> int:
        at = head.lower().index(b"content-length:") + 15
        return int(head[at : at + 12].split(b"\r\n")[0])


def infer_request(path: str, token: str, *, width: int, seed: int) -> bytes:
    """Return an inference request with one JSON row of `width` floats with four decimals."""
    draw = random.Random(seed)
    row = [round(draw.gauss(0, 1), 4) for _ in range(width)]
    body = json.dumps(
        {"inputs": [{"name": "x", "shape": [1, width], "datatype": "FP32", "data": row}]}
    ).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def binary_request(path: str, token: str, *, width: int, seed: int) -> bytes:
    """Return the same request with its row as bytes, which wants its answer as bytes."""
    draw = random.Random(seed)
    raw = struct.pack(f"<{width}f", *(draw.gauss(0, 1) for _ in range(width)))
    tensor = {
        "name": "x",
        "shape": [1, width],
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(raw)},
    }
    body = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [tensor]}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n"
    sizes = f"Inference-Header-Content-Length: {len(body)}\r\nContent-Length: {len(body) + len(raw)}\r\n\r\n"
    return f"{head}{sizes}".encode() + body + raw


async def main(
    port: int,
    connections: int,
    seconds: float,
    warm_up_s: float,
    token: str,
    kind: str = "json",
    width: str = "32",
) -> None:
    loop = asyncio.get_running_loop()
    times: list[float] = []
    clients = []
    for number in range(connections):
        make = binary_request if kind == "binary" else infer_request
        request = make("/v2/models/a/infer", token, width=int(width), seed=number)
        _, client = await loop.create_connection(lambda r=request: Client(r, times), "127.0.0.1", port)
        clients.append(client)
    await asyncio.sleep(warm_up_s)
    times.clear()
    began, spent = time.perf_counter(), cpu_seconds()
    await asyncio.sleep(seconds)
    taken, spent = time.perf_counter() - began, cpu_seconds() - spent
    found = sorted(times)
    result = {
        "rate": len(found) / taken,
        "p50_ms": found[len(found) // 2] * 1e3,
        "p99_ms": found[len(found) * 99 // 100] * 1e3,
        "failures": sum(client.failures for client in clients),
        "generator_cpu": spent / taken,
    }
    print(json.dumps(result), flush=True)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    port, connections, seconds, warm_up_s, *more = sys.argv[1:]
    uvloop.run(main(int(port), int(connections), float(seconds), float(warm_up_s), *more))
