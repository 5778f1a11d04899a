"""A TCP proxy on loopback that cuts connections on request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PIECE = 16384


@dataclass
class CuttingProxy:
    """Forwards to `target`; the n-th connection is cut when `cuts[n]` bytes have come back, later ones never."""

    target: tuple[str, int]
    cuts: Sequence[int]
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    connections: int = 0
    sent: bytearray = field(default_factory=bytearray)
    """All that clients have sent."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                cut = self.cuts[self.connections] if self.connections < len(self.cuts) else None
                self.connections += 1
                threading.Thread(target=self.forward, args=(client, cut)).start()

    def forward(self, client: socket.socket, cut: int | None) -> None:
        with client, socket.create_connection(self.target) as server:
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            upward = threading.Thread(target=self.pump_up, args=(client, server))
            upward.start()
            with suppress(OSError):
                while piece := server.recv(PIECE):
                    client.sendall(piece if cut is None else piece[:cut])
                    cut = None if cut is None else cut - len(piece)
                    if cut is not None and cut <= 0:
                        break
            for end in (client, server):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            upward.join()

    def pump_up(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while piece := client.recv(PIECE):
                self.sent += piece
                server.sendall(piece)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting_proxy(url: str, cuts: Sequence[int], *, port: int = 0) -> Iterator[CuttingProxy]:
    """Yield a proxy before `url`, at `port` if that is given."""
    parts = urlsplit(url)
    listener = socket.create_server(("127.0.0.1", port))
    proxy = CuttingProxy((str(parts.hostname), parts.port or 80), cuts, listener)
    accepting = threading.Thread(target=proxy.accept)
    accepting.start()
    try:
        yield proxy
    finally:
        proxy.listener.shutdown(socket.SHUT_RDWR)
        proxy.listener.close()
        accepting.join()
