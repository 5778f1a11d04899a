"""A load generator for a mix of requests: a number of connections, each with one request in flight.

The mix is a JSON file: lists of whole HTTP requests, and how often each is drawn. `@KEY@` becomes a new idempotency
key, `@STEP@` a new number of nine digits.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from itertools import count
from pathlib import Path

import uvloop

STEPS = count(100_000_000)
KEYS = count(1)


class Mix:
    """Draws requests."""

    def __init__(self, parts: list[dict[str, object]], seed: int) -> None:
        self._draw = random.Random(seed)
        self._names = [str(part["name"]) for part in parts]
        self._weights = [float(part["weight"]) for part in parts]  # type: ignore[arg-type]
        self._requests = {
            str(part["name"]): [str(each).encode() for each in part["requests"]]  # type: ignore[attr-defined]
            for part in parts
        }

    def next(self) -> tuple[str, bytes]:
        name = self._draw.choices(self._names, self._weights)[0]
        request = self._draw.choice(self._requests[name])
        if b"@KEY@" in request:
            request = request.replace(b"@KEY@", b"load-%d-%d" % (id(self), next(KEYS)))
        if b"@STEP@" in request:
            request = request.replace(b"@STEP@", b"%d" % next(STEPS))
        return name, request


class Client(asyncio.Protocol):
    """Sends the next request when a response is complete, and connects again if the server closed."""

    def __init__(self, mix: Mix, times: list[tuple[str, float]], failures: list[str]) -> None:
        self._mix = mix
        self._times = times
        self._failures = failures
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._failures.append("the connection was closed")

    def data_received(self, data: bytes) -> None:
        got = self._got + data if self._got else data
        head = got.find(b"\r\n\r\n")
        if head < 0 or len(got) < head + 4 + _body_bytes(got[:head]):
            self._got = got
            return
        self._got = b""
        if not got.startswith((b"HTTP/1.1 200", b"HTTP/1.1 201")):
            self._failures.append(got[:400].decode("utf-8", "replace"))
        self._times.append((self._name, time.perf_counter() - self._began))
        self._send()

    def _send(self) -> None:
        self._name, request = self._mix.next()
        self._began = time.perf_counter()
        self._transport.write(request)


def _body_bytes(head: bytes) -> int:
    at = head.lower().index(b"content-length:") + 15
    return int(head[at : at + 12].split(b"\r\n")[0])


async def main(port: int, connections: int, seconds: float, warm_up_s: float, mix: Path) -> None:
    loop = asyncio.get_running_loop()
    times: list[tuple[str, float]] = []
    failures: list[str] = []
    parts = json.loads(mix.read_text())
    for number in range(connections):
        source = Mix(parts, number)
        await loop.create_connection(lambda s=source: Client(s, times, failures), "127.0.0.1", port)
    await asyncio.sleep(warm_up_s)
    times.clear()
    began, spent = time.perf_counter(), cpu_seconds()
    await asyncio.sleep(seconds)
    taken, spent = time.perf_counter() - began, cpu_seconds() - spent
    found = sorted(duration for _, duration in times)
    by_name = {str(part["name"]): sorted(d for n, d in times if n == part["name"]) for part in parts}
    result = {
        "rate": len(found) / taken,
        "p50_ms": found[len(found) // 2] * 1e3,
        "p99_ms": found[len(found) * 99 // 100] * 1e3,
        "failures": len(failures),
        "failure": failures[0] if failures else None,
        "generator_cpu": spent / taken,
        "parts": {
            n: [len(f), round(f[len(f) // 2] * 1e3, 1), round(f[len(f) * 99 // 100] * 1e3, 1)]
            for n, f in by_name.items()
            if f
        },
    }
    print(json.dumps(result), flush=True)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    uvloop.run(
        main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
    )
