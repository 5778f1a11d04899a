"""Connections to one allowed host: to an address that was resolved before, kept between requests, a bounded number."""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, NamedTuple

from falaj.ports.egress import DeliveryFailed, EgressAnswer

IDLE_S = 30.0
"""A connection that was not used for longer is closed: servers and firewalls forget such ones."""
OLDEST_S = 300.0
"""After this time a connection is closed, so that the name is resolved, and its address checked, anew."""
WATCH_S = 0.05
"""How exact a deadline is."""
LOST = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)
"""How a kept connection ends that the host has closed meanwhile."""


class PinnedConnection(http.client.HTTPConnection):
    """A connection to an address that was resolved before; TLS is checked against the host's name."""

    def __init__(
        self, host: str, port: int, address: str, context: ssl.SSLContext | None, within_s: float
    ) -> None:
        super().__init__(host, port, timeout=within_s)
        self.default_port = 443 if context else 80
        self.is_overdue = False
        self.opened_at = self.used_at = time.monotonic()
        self._address = address
        self._tls = context

    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), timeout=self.timeout)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = plain
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)

    def abort(self) -> None:
        """End the request: whoever reads from the socket gets an error."""
        self.is_overdue = True
        connected = self.sock
        if connected is not None:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def is_usable(self, now: float) -> bool:
        """Return whether a request may be sent over this connection, which nobody uses."""
        if self.sock is None or now - self.used_at > IDLE_S or now - self.opened_at > OLDEST_S:
            return False
        waiting = select.poll()
        waiting.register(self.sock, select.POLLIN)
        return not waiting.poll(0)  # the host has closed it, or says what nobody asked for


def describe_failure(error: Exception, host: str, port: int, within_s: float) -> str:
    """Return why a request got no answer, without anything that the request contained."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {host} is not valid: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return f"{host}:{port} did not answer within {within_s:g} s"
    if isinstance(error, http.client.HTTPException):
        return f"{host}:{port} ended the connection, or did not answer in HTTP ({type(error).__name__})"
    return f"{host}:{port}: {getattr(error, 'strerror', None) or type(error).__name__}"


class KeptConnections:
    """Requests to one host from many threads, over at most `most` connections that are kept between requests.

    `connect` opens one, or raises DeliveryFailed. `headers` are sent with each request; they may be secrets.
    """

    def __init__(
        self,
        connect: Callable[[float], PinnedConnection],
        *,
        path: str,
        headers: Mapping[str, str],
        most: int,
    ) -> None:
        self._connect, self._path, self._headers, self._most = connect, path, dict(headers), most
        self._free = threading.Semaphore(most)
        self._idle: list[PinnedConnection] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._deadlines = _DeadlineWatch()

    def ask(
        self,
        method: Literal["GET", "POST"],
        path: str,
        *,
        headers: Mapping[str, str],
        body: bytes,
        within_s: float,
        limit_bytes: int,
    ) -> EgressAnswer:
        request = _Request(
            method,
            self._path + path,
            {**headers, **self._headers},
            body,
            within_s,
            time.monotonic() + within_s,
        )
        if not self._free.acquire(timeout=within_s):
            raise DeliveryFailed(f"all {self._most} connections were in use for {within_s:g} s")
        try:
            kept = self._take_idle()
            if kept is not None:
                with suppress(_LostError):
                    return self._exchange(kept, request, limit_bytes)
            fresh = self._connect(request.left_s())
            try:
                return self._exchange(fresh, request, limit_bytes)
            except _LostError as lost:
                raise DeliveryFailed(str(lost)) from None
        finally:
            self._free.release()

    def close(self) -> None:
        """Close what is idle; requests that go on end as they would."""
        with self._lock:
            self._is_closed, idle, self._idle = True, self._idle, []
        for connection in idle:
            connection.close()
        self._deadlines.close()

    def _take_idle(self) -> PinnedConnection | None:
        """Return the connection that was used last, if it still can be."""
        while True:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is None or found.is_usable(time.monotonic()):
                return found
            found.close()

    def _exchange(self, connection: PinnedConnection, request: _Request, limit_bytes: int) -> EgressAnswer:
        """Send a request, and keep the connection if its answer was read to the end. _LostError if it was closed."""
        is_whole, answer = False, None
        try:
            with self._deadlines.watching(connection, request.until):
                if connection.sock is not None:
                    connection.sock.settimeout(request.left_s())
                connection.request(request.method, request.path, body=request.body, headers=request.headers)
                answer = connection.getresponse()
                if answer.length is None and not answer.chunked:  # or its head was cut off
                    raise http.client.IncompleteRead(b"")
                content = answer.read(limit_bytes + 1)
            if len(content) > limit_bytes:
                raise DeliveryFailed(f"the answer is larger than {limit_bytes} bytes")
            if answer.length:  # http.client does not complain where it was told how much to read
                raise http.client.IncompleteRead(b"", answer.length)
            is_whole = answer.isclosed() and not answer.will_close and not connection.is_overdue
            found = {name.lower(): value for name, value in answer.getheaders()}
            return EgressAnswer(answer.status, found, content)
        except (OSError, http.client.HTTPException) as error:
            failed = TimeoutError() if connection.is_overdue else error
            words = describe_failure(failed, connection.host, connection.port, request.within_s)
            kind = _LostError if isinstance(failed, LOST) else DeliveryFailed
            raise kind(words) from None
        finally:
            if answer is not None:
                answer.close()
            self._give_back(connection, is_whole=is_whole)

    def _give_back(self, connection: PinnedConnection, *, is_whole: bool) -> None:
        connection.used_at = time.monotonic()
        with self._lock:
            if is_whole and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()


class _Request(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    within_s: float
    until: float

    def left_s(self) -> float:
        return max(WATCH_S, self.until - time.monotonic())


class _LostError(Exception):
    """The host has closed the connection before it answered."""


class _DeadlineWatch:
    """Ends the requests of a client that are overdue, from one thread, which starts with the first of them.

    The timeout of a socket is not enough: a host that sends a byte now and then would hold a request for ever.
    """

    def __init__(self) -> None:
        self._running: dict[PinnedConnection, float] = {}
        self._wanted = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def watching(self, connection: PinnedConnection, until: float) -> _Watching:
        """Return a context in which the connection is ended at `until`."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="egress deadlines", daemon=True)
                self._thread.start()
        return _Watching(self._running, self._wanted, connection, until)

    def close(self) -> None:
        self._is_closed = True
        self._wanted.set()

    def _watch(self) -> None:
        while not self._is_closed or self._running:
            self._wanted.wait()
            self._wanted.clear()
            while self._running:
                time.sleep(WATCH_S)
                now = time.monotonic()
                for connection, until in list(self._running.items()):
                    if now > until:
                        connection.abort()


class _Watching:
    def __init__(
        self,
        running: dict[PinnedConnection, float],
        wanted: threading.Event,
        connection: PinnedConnection,
        until: float,
    ) -> None:
        self._running, self._wanted, self._connection, self._until = running, wanted, connection, until

    def __enter__(self) -> None:
        self._running[self._connection] = self._until
        self._wanted.set()

    def __exit__(self, *_: object) -> None:
        self._running.pop(self._connection, None)
