"""A load generator that checks answers: every request has an input of its own, and its answer must be that input."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator

import uvloop

DATA = re.compile(rb'"data":\[([^]]*)\]')


class CheckingClient(asyncio.Protocol):
    """Sends the next number when the answer to the last one is complete."""

    def __init__(self, token: str, numbers: Iterator[int], done: asyncio.Event) -> None:
        self._head = f"POST /v2/models/a/infer HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n"
        self._numbers = numbers
        self._done = done
        self._got = b""
        self.answered = self.wrong = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done.set()

    def data_received(self, data: bytes) -> None:
        self._got += data
        head = self._got.find(b"\r\n\r\n")
        if head < 0:
            return
        at = self._got.lower().index(b"content-length:") + 15
        if len(self._got) < head + 4 + int(self._got[at : at + 12].split(b"\r\n")[0]):
            return
        found = DATA.search(self._got, head)
        self.answered += 1
        self.wrong += found is None or float(found[1]) != self._expected
        self._got = b""
        self._send()

    def _send(self) -> None:
        number = next(self._numbers, None)
        if number is None:
            self._done.set()
            return
        self._expected = float(number)
        body = b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[%d]}]}' % number
        self._transport.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


async def main(port: int, connections: int, requests: int, token: str) -> None:
    loop, numbers = asyncio.get_running_loop(), iter(range(1, requests + 1))
    clients, ends = [], []
    began = time.perf_counter()
    for _ in range(connections):
        ends.append(asyncio.Event())
        made = CheckingClient(token, numbers, ends[-1])
        await loop.create_connection(lambda made=made: made, "127.0.0.1", port)
        clients.append(made)
    await asyncio.gather(*(end.wait() for end in ends))
    answered, wrong = sum(c.answered for c in clients), sum(c.wrong for c in clients)
    rate = answered / (time.perf_counter() - began)
    print(json.dumps({"answered": answered, "wrong": wrong + requests - answered, "rate": rate}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
