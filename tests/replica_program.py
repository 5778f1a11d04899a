"""A replica that answers lines: "0.5" is answered after half a second, by its name and process."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time

from falaj.apps.model_server.replica import ParentChannel, SharedSockets, read_facts
from falaj.apps.socket_listener import SocketListener


async def main(load_s: float, mode: str) -> None:
    facts = read_facts()
    assert facts is not None
    clients: set[asyncio.StreamWriter] = set()
    listeners: list[SocketListener] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.add(writer)
        while line := await reader.readline():
            await asyncio.sleep(float(line))
            writer.write(f"{facts.name} {os.getpid()}\n".encode())
            await writer.drain()
        clients.discard(writer)

    def accept(listener: socket.socket) -> SocketListener:
        made = SocketListener(listener, lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), answer))
        made.start()
        listeners.append(made)
        return made

    channel, sockets = ParentChannel(facts.reports), SharedSockets(facts.sockets, {"lines": accept})
    channel.open()
    if mode == "problem":
        channel.report(problem="the file is missing")
        sys.exit(1)
    channel.report(state="loading")
    await asyncio.sleep(load_s)
    os.write(facts.reports, b"{not json\n[]\n" + b'{"load": {"in_flight": "many"}}\n')
    channel.report(state="ready")
    channel.report(load={"in_flight": 2, "requests_per_s": 10, "p50_ms": 1, "p99_ms": 5, "rss_bytes": 1000})
    while "stop" not in (message := await channel.messages.get()):
        sockets.accept_from(message["accept"])
    sockets.close()
    until = time.monotonic() + message["stop"]
    while (
        (clients or any(each.opening for each in listeners)) and time.monotonic() < until
    ) or mode == "stays":
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), sys.argv[2]))
