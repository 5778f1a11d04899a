"""Ports as `falaj up` passes them to its children: `7480` is that port, `7480+` that one or the next that is free."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

STEP, TRIES = 2, 50
"""Every second port is tried: those of the API stay even and those of the model server odd."""


def spell_port(port: int, *, fixed: bool) -> str:
    """Return `port` as an argument; unless it is `fixed`, the child may choose a later one."""
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
