"""Ports of `falaj up`: `7480` is that port, `7480+` that one or the next that is free."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

BACKLOG = 1024
STEP, TRIES = 2, 50
"""Every second port is tried: those of the API stay even and those of the model server odd."""


def spell_port(port: int, *, fixed: bool) -> str:
    """Return `port` as text; unless it is `fixed`, a later one may be chosen."""
    return str(port) if fixed or port == 0 else f"{port}+"


def listen_on(text: str, listen: Callable[[int], socket.socket]) -> socket.socket:
    """Return the socket that `listen` opens on the port in `text`, or on the first later one that is free."""
    first = int(text.removesuffix("+"))
    ports = range(first, min(first + STEP * TRIES, 65536), STEP) if text.endswith("+") else [first]
    for port in ports[:-1]:
        try:
            return listen(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return listen(ports[-1])


def open_sockets(bind: str, text: str, number: int) -> list[socket.socket]:
    """Return sockets that listen on the port in `text` together: the kernel spreads connections among them.

    The first one takes the port for itself before it is shared, so that no two platforms listen on one port.
    """
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    first = listen_on(text, lambda port: _listen(family, (bind, port)))
    opened = [first]
    try:
        for _ in range(number - 1):
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            opened.append(_listen(family, (bind, first.getsockname()[1]), shared=True))
    except OSError:
        for each in opened:
            each.close()
        raise
    return opened


def _listen(family: socket.AddressFamily, address: tuple[str, int], *, shared: bool = False) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
