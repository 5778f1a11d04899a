"""Authentication of requests: a bearer token becomes a caller, cached until the policy epoch changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from starlette.requests import HTTPConnection, Request

from falaj.errors import Unauthenticated
from falaj.governance.identity.directory import REFUSED, Authenticator, is_still_valid
from falaj.governance.identity.failures import FailedAuthentications
from falaj.governance.operations.caller import Caller
from falaj.governance.policy.epochs import RecentEpoch
from falaj.ports.metadata import Database

CACHE_SIZE = 10_000
INTERFACE = "api"
"""Where an authentication failed, in the audit log."""


class TokenAuthenticator:
    """Authenticates bearer tokens with a cache; the gate asks again if the policy epoch has moved since."""

    def __init__(
        self,
        authenticator: Authenticator,
        database: Database,
        clock: Callable[[], datetime],
        failures: FailedAuthentications,
    ) -> None:
        self._failures = failures
        self._authenticator = authenticator
        self._clock = clock
        self._database = database
        self._epoch = RecentEpoch(database)
        self._cache: dict[bytes, tuple[int, datetime, Caller]] = {}

    def caller(self, request: Request) -> Caller:
        """Return the caller of `request`; raise Unauthenticated unless it has a valid token."""
        scheme, _, credential = request.headers.get("authorization", "").partition(" ")
        origin = origin_of(request)
        if scheme.lower() != "bearer" or not credential:
            self._failures.add("no_token", origin, interface=INTERFACE)
            raise Unauthenticated("no token was given; send 'Authorization: Bearer …'")
        try:
            return self.authenticate(credential.strip(), origin=origin)
        except Unauthenticated:
            self._failures.add("refused_token", origin, interface=INTERFACE)
            raise

    def recall(self, request: Request) -> Caller | None:
        """Return the caller of `request` from memory, without I/O; none if it takes more to know."""
        scheme, _, credential = request.headers.get("authorization", "").partition(" ")
        epoch = self._epoch.fresh()
        if epoch is None or scheme.lower() != "bearer":
            return None
        return self._known(_digest(credential.strip(), origin_of(request)), epoch)

    def authenticate(self, credential: str, *, origin: str) -> Caller:
        """Return the caller that `credential` belongs to."""
        digest, epoch = _digest(credential, origin), self._epoch.value()
        known = self._known(digest, epoch)
        if known is not None:
            return known
        caller, until = self._authenticator.authenticate(credential, origin=origin)
        caller = replace(caller, epoch=epoch)
        if len(self._cache) >= CACHE_SIZE:
            self._cache.clear()
        self._cache[digest] = (epoch, until, caller)
        return caller

    def require_valid(self, request: Request) -> None:
        """Raise Unauthenticated unless `request` has a token that is valid now: for what does not pass the gate."""
        caller = self.caller(request)
        with self._database.read() as tx:
            if not is_still_valid(tx, caller, self._clock()):
                raise Unauthenticated(REFUSED)

    def _known(self, digest: bytes, epoch: int) -> Caller | None:
        known = self._cache.get(digest)
        return known[2] if known is not None and known[0] == epoch and self._clock() < known[1] else None


def _digest(credential: str, origin: str) -> bytes:
    return hashlib.sha256(f"{origin} {credential}".encode()).digest()


def origin_of(request: HTTPConnection) -> str:
    """Return where the request comes from, for policy and audit."""
    return f"remote:{request.client.host}" if request.client else "remote"
