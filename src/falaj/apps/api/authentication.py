"""Authentication of requests: a bearer token becomes a caller, cached until the policy epoch changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import datetime

from starlette.requests import Request

from falaj.errors import Unauthenticated
from falaj.governance.identity.directory import Authenticator
from falaj.governance.operations.caller import Caller
from falaj.governance.policy.epochs import RecentEpoch
from falaj.ports.metadata import Database

CACHE_SIZE = 10_000


class TokenAuthenticator:
    """Authenticates bearer tokens with a cache. A revoked token is refused within a second, in every process."""

    def __init__(
        self, authenticator: Authenticator, database: Database, clock: Callable[[], datetime]
    ) -> None:
        self._authenticator = authenticator
        self._clock = clock
        self._epoch = RecentEpoch(database)
        self._cache: dict[bytes, tuple[int, datetime, Caller]] = {}

    def caller(self, request: Request) -> Caller:
        """Return the caller of `request`; raise Unauthenticated unless it has a valid token."""
        scheme, _, credential = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not credential:
            raise Unauthenticated("no token was given; send 'Authorization: Bearer …'")
        return self.authenticate(credential.strip(), origin=origin_of(request))

    def authenticate(self, credential: str, *, origin: str) -> Caller:
        """Return the caller that `credential` belongs to."""
        digest = hashlib.sha256(f"{origin} {credential}".encode()).digest()
        epoch, now = self._epoch.value(), self._clock()
        known = self._cache.get(digest)
        if known is not None and known[0] == epoch and now < known[1]:
            return known[2]
        caller, until = self._authenticator.authenticate(credential, origin=origin)
        if len(self._cache) >= CACHE_SIZE:
            self._cache.clear()
        self._cache[digest] = (epoch, until, caller)
        return caller


def origin_of(request: Request) -> str:
    """Return where the request comes from, for policy and audit."""
    return f"remote:{request.client.host}" if request.client else "remote"
