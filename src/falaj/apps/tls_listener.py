"""Accepts TLS connections. Handshakes are limited in number and time: a client pays nothing for one that never ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from falaj.records.config import Tls

log = logging.getLogger(__name__)

MOST_HANDSHAKES = 200
"""Handshakes at a time; the oldest makes room for another. Each may take a few hundred kilobytes."""
HANDSHAKE_S = 10.0
RETRY_S = 0.1
"""The pause after a connection could not be accepted, as for want of file descriptors."""


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
        listener.setblocking(False)
        self._listener, self._context, self._protocol = listener, _server_context(tls, protocols), protocol
        self._handshakes: dict[socket.socket, asyncio.Task[None]] = {}  # oldest first
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Accept connections from now on, in the running event loop."""
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Accept no more connections, and end unfinished handshakes."""
        if self._accepting is not None:
            self._accepting.add_done_callback(
                lambda _: self._listener.close()
            )  # not while the loop watches it
            self._accepting.cancel()
        for connection in list(self._handshakes):
            _end(connection)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("a connection was not accepted", extra={"reason": str(error)})
                await asyncio.sleep(RETRY_S)
                continue
            if len(self._handshakes) >= MOST_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                _end(oldest)
            self._handshakes[connection] = loop.create_task(self._shake_hands(connection))
            await asyncio.sleep(0)  # a crowd of connections does not keep the others waiting

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
