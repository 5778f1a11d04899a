"""The connections of a model server, whatever protocol they speak: counted by caller, and limited in number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from falaj.apps.byte_shares import ByteShares
from falaj.apps.model_server.http.access import HttpAccess
from falaj.apps.model_server.http.exchange import HttpExchange
from falaj.apps.model_server.http.responses import HttpResponse
from falaj.apps.model_server.limits import ServerLimits
from falaj.apps.model_server.metrics import ServerMetrics
from falaj.errors import FalajError, Unavailable
from falaj.records.governance.identity import FailureReason

STRANGERS_SHARE = 10
"""Where all connections are in use, one in so many may be of a client that has not presented a token yet."""


class ServerConnection(Protocol):
    """A connection as the server sees it, whatever protocol it speaks."""

    deadline: float

    @property
    def waits_for_client(self) -> bool: ...
    @property
    def pending(self) -> int: ...
    def expire(self) -> None: ...
    def close_after_response(self) -> None: ...
    def close_when_idle(self) -> None: ...
    def abort(self) -> None: ...


class ServerContext(Protocol):
    """The server as its connections see it."""

    limits: ServerLimits
    access: HttpAccess
    metrics: ServerMetrics
    connections: set[ServerConnection]
    now: float
    """Monotonic seconds as of the last sweep: precise enough for deadlines, and free."""
    stopping: bool
    shares: ByteShares
    strangers: dict[ServerConnection, None]
    """Connections that have not presented a valid token yet, oldest first."""
    callers: dict[str, dict[ServerConnection, None]]
    """The other connections by their caller, oldest first."""

    def dispatch(self, exchange: HttpExchange) -> None: ...
    def compress(self, exchange: HttpExchange, response: HttpResponse, coding: bytes) -> None:
        """Compress a large response in a thread, and send it."""

    def recognize(self, credential: str) -> str | None:
        """Return the caller of a credential if it is known from memory."""

    def authenticate(
        self, exchange: HttpExchange, source: str, done: Callable[[str, FalajError | None], None]
    ) -> None:
        """Authenticate the credential of a request in a thread; call `done` with the caller, or with an error."""

    def authentication_failed(self, reason: FailureReason, source: str) -> None:
        """Count a failed authentication for the audit log."""


def spare_connection(context: ServerContext) -> ServerConnection | None:
    """Return the connection that makes room for another; so nobody keeps others out by holding connections.

    It is the oldest stranger where these have more than their share, otherwise the oldest connection without a
    pending request of the caller who has the most of them: its client opens another when it finds one closed.
    Within their share, strangers stay until they have had time to present a token.
    """
    oldest = next(iter(context.strangers), None)
    if len(context.strangers) > context.limits.connections // STRANGERS_SHARE:
        return oldest
    for theirs in sorted(context.callers.values(), key=len, reverse=True):
        for connection in theirs:
            if connection.waits_for_client:
                return connection
    return oldest


def count_for_caller(
    context: ServerContext, connection: ServerConnection, caller: str, *, before: str
) -> None:
    """Count a connection, until now a stranger's or of the caller `before`, as one of `caller`."""
    context.strangers.pop(connection, None)
    _leave_caller(context, connection, before)
    context.callers.setdefault(caller, {})[connection] = None


def stop_counting(context: ServerContext, connection: ServerConnection, caller: str) -> None:
    """Count a connection of `caller` no longer; nothing happens the second time."""
    if connection in context.connections:
        context.connections.discard(connection)
        context.metrics.connections -= 1
    context.strangers.pop(connection, None)
    _leave_caller(context, connection, caller)


def _leave_caller(context: ServerContext, connection: ServerConnection, caller: str) -> None:
    theirs = context.callers.get(caller)
    if theirs is not None and theirs.pop(connection, connection) is None and not theirs:
        del context.callers[caller]


def address_of(transport: asyncio.BaseTransport) -> str:
    peer = transport.get_extra_info("peername")
    return f"remote:{peer[0]}" if isinstance(peer, tuple) and peer else "local"


def too_much_held() -> Unavailable:
    return Unavailable(
        "your unanswered requests hold as much of the server's memory as it has left; try again later"
    )
