"""A replica's side of the processes driver: accepts from the sockets that the parent assigns, and reports its load."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from falaj.governance.operations.caller import start_thread

ENVIRONMENT = "FALAJ_REPLICA_SOCKETS"
"""The variable by which the processes driver tells a process which replica it is."""
LINE_BYTES = 64 * 1024

_log = logging.getLogger(__name__)


class Listening(Protocol):
    """Accepts connections of a socket."""

    def release(self) -> None:
        """Accept no more, close the socket, and keep the connections that were accepted."""


Accept = Callable[[socket.socket], Listening]
"""Begins to accept connections of a socket."""


@dataclass(frozen=True)
class ReplicaFacts:
    """What the parent says about a replica: its name, the descriptors of its sockets by group, and where it reports."""

    name: str
    sockets: Mapping[str, Sequence[int]]
    reports: int


def read_facts() -> ReplicaFacts | None:
    """Return which replica this process is; none if it was not started as one."""
    text = os.environ.pop(ENVIRONMENT, None)
    if text is None:
        return None
    facts = ReplicaFacts(**json.loads(text))
    for number in (facts.reports, *(each for group in facts.sockets.values() for each in group)):
        os.set_inheritable(number, False)  # models in processes of their own get none of them
    return facts


class SharedSockets:
    """The sockets of all replicas, of which this one accepts from those that are assigned to it."""

    def __init__(self, sockets: Mapping[str, Sequence[int]], accept: Mapping[str, Accept]) -> None:
        """`accept`: by group of sockets, how to begin to accept from one."""
        self._descriptors = sockets
        self._accept = accept
        self._listening: dict[tuple[str, int], Listening] = {}

    def accept_from(self, assigned: Mapping[str, Sequence[int]]) -> None:
        """Accept from exactly the assigned sockets, by their places in their groups."""
        wanted = {(group, place) for group in assigned if group in self._accept for place in assigned[group]}
        for key in [key for key in self._listening if key not in wanted]:
            self._listening.pop(key).release()
        for group, place in sorted(wanted - self._listening.keys()):
            copy = socket.socket(fileno=os.dup(self._descriptors[group][place]))
            copy.setblocking(False)
            self._listening[group, place] = self._accept[group](copy)

    def close(self) -> None:
        """Accept no more, and let go of all sockets: they stay open in the parent."""
        for listening in self._listening.values():
            listening.release()
        self._listening.clear()
        for number in (each for group in self._descriptors.values() for each in group):
            with suppress(OSError):
                os.close(number)
        self._descriptors = {}


@dataclass
class ParentChannel:
    """Messages of the parent, and reports to it. The end of the messages, and a signal, mean "stop at once"."""

    reports: int
    messages: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)

    def open(self) -> None:
        """Read messages from standard input from now on, in the running event loop."""
        loop = asyncio.get_running_loop()
        os.set_blocking(self.reports, False)

        def put(message: dict[str, Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.messages.put_nowait, message)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.messages.put_nowait, {"stop": 0})
        start_thread(_read_messages, put, name="parent-watch")

    def report(self, **facts: object) -> None:
        """Report to the parent; what it does not read in time is lost."""
        with suppress(OSError):
            os.write(self.reports, json.dumps(facts).encode() + b"\n")


def _read_messages(put: Callable[[dict[str, Any]], None]) -> None:
    unread = b""
    while chunk := os.read(0, LINE_BYTES):
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            try:
                put(dict(json.loads(line)))
            except ValueError:
                _log.error("a message of the parent was not understood: %r", line[:200])
    put({"stop": 0})
