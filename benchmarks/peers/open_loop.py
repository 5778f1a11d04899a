"""An open-loop load generator: requests arrive at random, whether or not earlier ones are answered.

    python open_loop.py PORT TOKEN BODIES OUTPUT RATE:SECONDS…

Arrivals are a Poisson process. Latency counts from the time at which a request was meant to be sent: a server that
stalls cannot hide it by keeping the generator from sending (coordinated omission). A request that fails before its
response has begun gets the status 0. BODIES is a JSON file with a list of rows and their expected outputs, OUTPUT gets
a list of [meant at, latency, status, is right], in seconds since the start.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import deque
from itertools import cycle
from pathlib import Path

import uvloop

MAX_CONNECTIONS = 400
TOLERANCE = 1e-3
RECONNECT_S = 0.05
SLEEP_S = 0.001


class Arrival:
    """A request: when it was meant to be sent, its bytes, and the right answer."""

    __slots__ = ("expected", "meant_at", "request")

    def __init__(self, meant_at: float, request: bytes, expected: float) -> None:
        self.meant_at = meant_at
        self.request = request
        self.expected = expected


class Client(asyncio.Protocol):
    """A connection with at most one request in flight."""

    def __init__(self, load: OpenLoop) -> None:
        self._load = load
        self._got = b""
        self._arrival: Arrival | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.lost(self, self._arrival)
        self._arrival = None

    def send(self, arrival: Arrival) -> None:
        self._arrival = arrival
        self._transport.write(arrival.request)

    def data_received(self, data: bytes) -> None:
        got = self._got = self._got + data if self._got else data
        head = got.find(b"\r\n\r\n")
        if head < 0 or self._arrival is None:
            return
        at = got.lower().index(b"content-length:") + 15
        size = int(got[at : at + 12].split(b"\r\n")[0])
        if len(got) < head + 4 + size:
            return
        arrival, self._arrival, self._got = self._arrival, None, b""
        self._load.answered(self, arrival, int(got[9:12]), got[head + 4 :])


class OpenLoop:
    """Sends arrivals over as many connections as are needed, and notes what became of them."""

    def __init__(self, port: int, requests: list[tuple[bytes, float]]) -> None:
        self._port = port
        self._requests = cycle(requests)
        self._loop = asyncio.get_running_loop()
        self._free: list[Client] = []
        self._unsent: deque[Arrival] = deque()
        self._connections = self._pending = 0
        self._connecting: set[asyncio.Task[None]] = set()
        self.began = time.perf_counter()
        self.seen: list[tuple[float, float, int, bool]] = []

    async def run(self, rate: float, seconds: float) -> None:
        """Send `rate` requests a second, and go on when the time is over."""
        draw, now = random.Random(int(rate)), time.perf_counter()
        until, due = now + seconds, now + random.expovariate(rate)
        while due < until:
            while due <= time.perf_counter():
                self._send(Arrival(due, *next(self._requests)))
                due += draw.expovariate(rate)
            await asyncio.sleep(min(SLEEP_S, max(0.0, due - time.perf_counter())))

    async def finish(self, within_s: float) -> None:
        """Wait for the last answers; what has none by then is lost."""
        until = time.perf_counter() + within_s
        while (self._pending or self._unsent) and time.perf_counter() < until:
            await asyncio.sleep(0.01)
        now = time.perf_counter()
        for arrival in self._unsent:
            self._note(arrival, now, 0, is_right=True)

    def _send(self, arrival: Arrival) -> None:
        if self._free:
            self._pending += 1
            self._free.pop().send(arrival)
            return
        self._unsent.append(arrival)
        if self._connections < MAX_CONNECTIONS:
            self._connections += 1
            task = self._loop.create_task(self._connect())
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self) -> None:
        while True:
            try:
                _, client = await self._loop.create_connection(lambda: Client(self), "127.0.0.1", self._port)
            except OSError:
                await asyncio.sleep(RECONNECT_S)
            else:
                self._next(client)
                return

    def _next(self, client: Client) -> None:
        if self._unsent:
            self._pending += 1
            client.send(self._unsent.popleft())
        else:
            self._free.append(client)

    def answered(self, client: Client, arrival: Arrival, status: int, body: bytes) -> None:
        self._pending -= 1
        self._note(
            arrival,
            time.perf_counter(),
            status,
            is_right=status != 200 or _is_right(body, arrival.expected),
        )
        self._next(client)

    def lost(self, client: Client, arrival: Arrival | None) -> None:
        self._connections -= 1
        if client in self._free:
            self._free.remove(client)
        if arrival is not None:
            self._pending -= 1
            self._note(arrival, time.perf_counter(), 0, is_right=True)

    def _note(self, arrival: Arrival, now: float, status: int, *, is_right: bool) -> None:
        self.seen.append((arrival.meant_at - self.began, now - arrival.meant_at, status, is_right))


def _is_right(body: bytes, expected: float) -> bool:
    try:
        (value,) = json.loads(body)["outputs"][0]["data"]
    except (ValueError, KeyError, IndexError, TypeError):
        return False
    return abs(value - expected) <= TOLERANCE * max(1.0, abs(expected))


def infer_request(row: list[float], token: str) -> bytes:
    tensor = {"name": "x", "shape": [1, len(row)], "datatype": "FP32", "data": row}
    body = json.dumps({"inputs": [tensor]}).encode()
    head = f"POST /v2/models/a/infer HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def main(port: int, token: str, bodies: Path, output: Path, *phases: str) -> None:
    requests = [(infer_request(row, token), expected) for row, expected in json.loads(bodies.read_text())]
    load = OpenLoop(port, requests)
    for phase in phases:
        rate, _, seconds = phase.partition(":")
        await load.run(float(rate), float(seconds))
    await load.finish(10)
    output.write_text(json.dumps(load.seen))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:]))
