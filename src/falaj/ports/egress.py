"""The port for outgoing requests: every one goes to a host that the operator has allowed, and to nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

Admit = Callable[[str], None]
"""Is called with the address that a request will go to; raises if it may not go there."""


class DeliveryFailed(Exception):
    """A request that got no answer in time; `str` says why, without the path of the URL, which may be a secret."""


class EgressAnswer(NamedTuple):
    """What a host has answered; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class EgressClient(Protocol):
    """Requests to one host over connections that are kept; several threads may ask at once."""

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
        """Send a request, and return the answer to it. Raise DeliveryFailed also if that is larger than the limit.

        `within_s` is the time for all of it. A request that a kept connection loses is sent once more.
        """
        ...

    def close(self) -> None: ...


class Egress(Protocol):
    """Sends requests to allowed hosts. Follows no redirect, uses no proxy, and resolves a name once per request."""

    def require(self, url: str) -> None:
        """Raise InvalidInput unless requests to `url` are allowed; no name is looked up."""
        ...

    def post(self, url: str, *, headers: Mapping[str, str], body: bytes, admit: Admit) -> int:
        """Send `body`, and return the status of the answer.

        Raise DeliveryFailed if there is none, or if the host or its address is not allowed.
        """
        ...

    def connect(
        self, url: str, *, headers: Mapping[str, str], ca: Path | None = None, most: int = 16
    ) -> EgressClient:
        """Return a client for requests to paths below `url`, each with `headers`, over at most `most` connections.

        `ca` has certificates of further authorities. Raise InvalidInput unless requests to `url` are allowed; no
        connection is opened yet.
        """
        ...
