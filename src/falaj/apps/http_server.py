"""HTTP servers of the platform's processes: sockets, TLS, and limits on heads, readers and connections."""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
from collections import Counter
from collections.abc import Iterator
from functools import partial

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from falaj.apps.api.errors import error_response
from falaj.apps.ports import listen_on
from falaj.apps.security_headers import HEADERS
from falaj.apps.tls_listener import TlsListener
from falaj.errors import Fault, InvalidInput, Unavailable
from falaj.records.control.tls import Tls

HEAD_BYTES = 64 * 1024
HEAD_S = 15.0
READ_BYTES, READ_S = 64 * 1024, 30.0
"""A client reads this much of an answer that waits for it, or all, in this time."""
CONNECTIONS = 2000
STRANGERS_SHARE = 10
"""Where all connections are in use, one in so many may be of a client that has not presented a token yet."""


class HttpServer(uvicorn.Server):
    """Serves HTTP on given sockets; with TLS, connections are its own whose handshake is over."""

    def __init__(self, settings: uvicorn.Config, *, tls: Tls | None) -> None:
        super().__init__(settings)
        self._tls = tls
        self._listeners: list[TlsListener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            return await super().startup(sockets)
        await super().startup([])
        for listener in sockets or []:
            listener.listen(self.config.backlog)
            self._listeners.append(TlsListener(listener, self._tls, self._protocol))
            self._listeners[-1].start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            listener.close()
        await super().shutdown(sockets if self._tls is None else None)

    def _protocol(self) -> asyncio.Protocol:
        return LimitedHeaders(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


class LimitedHeaders(HttpToolsProtocol):
    """Refuses heads that are too large or too slow, ends connections whose client does not read, and limits their
    number: nobody keeps others out by holding connections."""

    _deadline: asyncio.TimerHandle | None = None
    """Of the next head."""
    _reading: asyncio.TimerHandle | None = None
    """The next look at how much the client has read of an answer that waits for it."""
    _unread_bytes = 0
    _turn = 0
    """Grows with every wait for the client; the clock of the loop stands still within one turn of it."""
    _turns = itertools.count(1)
    caller = ""
    """Whose token was presented last; none: a stranger's connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS and not self._make_room():
            transport.close()
        else:
            self._start_head_timer()

    def introduce(self, caller: str) -> None:
        """Count this connection as one of `caller`. Unavailable if its requests occupy more of them than are left."""
        self.caller = caller
        if 2 * len(self.connections) <= CONNECTIONS:  # nobody can occupy too many of them
            return
        occupied = Counter(each.caller for each in self._others() if not each.waits_for_client)
        if occupied[caller] >= CONNECTIONS - occupied.total():
            raise Unavailable("your requests occupy as many connections as are left; try again later")

    @property
    def waits_for_client(self) -> bool:
        """Whether the client is to act: to send the rest of a request, or to read an answer."""
        sends = self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete
        return sends or self._deadline is not None or self.flow.write_paused

    def _others(self) -> Iterator[LimitedHeaders]:
        return (each for each in self.connections if isinstance(each, LimitedHeaders) and each is not self)

    def _make_room(self) -> bool:
        """Close a connection that waits for its client: the oldest of strangers where these have more than their share,
        otherwise the oldest of the caller who has the most of them."""
        others = [each for each in self._others() if not each.transport.is_closing()]
        waiting = [each for each in others if each.waits_for_client]
        if not waiting:
            return False
        holders, most = Counter(each.caller for each in waiting), ""
        if holders.pop("", 0) <= CONNECTIONS // STRANGERS_SHARE and holders:
            ((most, _),) = holders.most_common(1)
        spare = min((each for each in waiting if each.caller == most), key=lambda each: each._turn)
        if spare.transport.get_write_buffer_size():
            spare.transport.abort()  # to close it would wait for the client
        else:
            spare.transport.close()
        return True

    def _end(self) -> None:
        """Close the connection as soon as the client has read what was sent to it, if it reads that."""
        self.transport.close()
        if self._reading is None and self.transport.get_write_buffer_size():
            self._await_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_reading_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._start_head_timer()
        super().on_message_begin()
        self.scope["state"]["introduce"] = self.introduce

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._turn = next(self._turns)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Restart the timer for the next head: the rest of an unread body does not keep the connection open."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._start_head_timer()

    def timeout_keep_alive_handler(self) -> None:
        self._end()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._turn = next(self._turns)
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_reading_timer()

    def _await_reading(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(READ_S, self._check_reading)

    def _check_reading(self) -> None:
        if self.transport.get_write_buffer_size() > self._unread_bytes - READ_BYTES:
            self.transport.abort()
        else:
            self._await_reading()

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._turn = next(self._turns)
        self._deadline = self.loop.call_later(HEAD_S, self._end)

    def _stop_head_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name + value)
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """Respond to a request that cannot be parsed with a problem document and the security headers."""
        body = error_response(InvalidInput(f"the request cannot be parsed: {msg}"))
        headers = [*body.headers.items(), *HEADERS.items(), ("Connection", "close")]
        lines = ["HTTP/1.1 400 Bad Request", *(f"{name}: {value}" for name, value in headers), "", ""]
        self.transport.write("\r\n".join(lines).encode("latin-1") + bytes(body.body))
        self.transport.close()

    def _count(self, part: bytes) -> None:
        self._head_bytes += len(part)
        if self._head_bytes > HEAD_BYTES:
            raise ValueError("the request head is too large")


def listen(bind: str, port: str, *, section: str = "server") -> socket.socket:
    """Return a socket that listens; Unavailable, with the fix, if that is not possible. See `apps.ports` for `port`.

    `section` is the one of falaj.toml that sets the port.
    """
    try:
        return listen_on(port, partial(_open_listener, bind))
    except OSError as error:
        fixes = {
            errno.EADDRINUSE: f"stop what listens there, or set {section}.port: falaj up --port 0 takes a free one",
            errno.EACCES: "choose a port from 1024 on: falaj up --port 0 takes a free one",
            errno.EADDRNOTAVAIL: "choose an address of this machine: falaj up --bind 127.0.0.1",
        }
        raise Unavailable(
            f"the {'API' if section == 'server' else section} cannot listen on {bind}:{port}: {error.strerror}",
            faults=[
                Fault(
                    where=f"{section}.bind and {section}.port",
                    given=f"{bind}:{port}",
                    allowed="an address of this machine, and a port on which nothing listens",
                    fix=fixes.get(error.errno or 0),
                )
            ],
        ) from None


def _open_listener(bind: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    protocol = socket.IPPROTO_TCP  # explicit, so that asyncio sets TCP_NODELAY
    listener = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
