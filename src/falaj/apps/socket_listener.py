"""Accepts connections of a socket that other processes may accept from as well: none is lost when this one stops.

The listeners of asyncio drop a connection that was accepted just before they are closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Connections accepted before others get their turn."""
RETRY_S = 0.1
"""The pause after a connection could not be accepted, as for want of file descriptors."""


class Acceptor:
    """Calls `accepted` with each connection of a socket that listens."""

    def __init__(self, listener: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        listener.setblocking(False)
        self._listener, self._accepted = listener, accepted
        self._retrying: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accept connections from now on, in the running event loop."""
        self._retrying = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def stop(self) -> None:
        """Accept no more connections, and close the socket here."""
        if self._retrying is not None:
            self._retrying.cancel()
        elif self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("a connection was not accepted", extra={"reason": str(error)})
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                self._retrying = loop.call_later(RETRY_S, self.start)
                return
            connection.setblocking(False)
            self._accepted(connection)


class SocketListener:
    """Accepts connections without TLS."""

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._protocol = protocol
        self._acceptor = Acceptor(listener, self._accepted)
        self._opening: set[asyncio.Task[None]] = set()

    @property
    def opening(self) -> int:
        """The number of connections that were accepted and are not in use yet."""
        return len(self._opening)

    def start(self) -> None:
        """Accept connections from now on, in the running event loop."""
        self._acceptor.start()

    def release(self) -> None:
        """Accept no more connections; those that were accepted stay."""
        self._acceptor.stop()

    close = release

    def _accepted(self, connection: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(partial(set.discard, self._opening))

    async def _open(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        except OSError:
            connection.close()
