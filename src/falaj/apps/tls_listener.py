"""Accepts TLS connections. Handshakes are limited in number and time: a client pays nothing for one that never ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence

from falaj.apps.socket_listener import Acceptor
from falaj.records.control.tls import Tls

MOST_HANDSHAKES = 200
"""Handshakes at a time; the oldest makes room for another. Each may take a few hundred kilobytes."""
HANDSHAKE_S = 10.0


class TlsListener:
    """Accepts connections on a socket that listens; the protocol of one is made when its handshake is over."""

    def __init__(
        self,
        listener: socket.socket,
        tls: Tls,
        protocol: Callable[[], asyncio.Protocol],
        *,
        protocols: Sequence[str] = (),
    ) -> None:
        """`protocols` are the names by which clients may ask for the protocol in the handshake (ALPN)."""
        self._context, self._protocol = _server_context(tls, protocols), protocol
        self._handshakes: dict[socket.socket, asyncio.Task[None]] = {}  # oldest first
        self._acceptor = Acceptor(listener, self._accepted)

    @property
    def opening(self) -> int:
        """The number of unfinished handshakes."""
        return len(self._handshakes)

    def start(self) -> None:
        """Accept connections from now on, in the running event loop."""
        self._acceptor.start()

    def release(self) -> None:
        """Accept no more connections; unfinished handshakes go on."""
        self._acceptor.stop()

    def close(self) -> None:
        """Accept no more connections, and end unfinished handshakes."""
        self.release()
        for connection in list(self._handshakes):
            _end(connection)

    def _accepted(self, connection: socket.socket) -> None:
        if len(self._handshakes) >= MOST_HANDSHAKES:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            _end(oldest)
        shaking = asyncio.get_running_loop().create_task(self._shake_hands(connection))
        self._handshakes[connection] = shaking

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except (OSError, ssl.SSLError, TimeoutError):
            connection.close()
        finally:
            self._handshakes.pop(connection, None)


def _end(connection: socket.socket) -> None:
    """End an unfinished handshake: it fails, and cleans up after itself."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _server_context(tls: Tls, protocols: Sequence[str]) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(tls.certificate, tls.key)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context
