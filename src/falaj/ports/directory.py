"""Who is who: turns what a caller presents into a principal. Built-in tokens today, OIDC beside them later."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple, Protocol

from falaj.records.governance.identity import PrincipalKind
from falaj.records.names import ObjectId


class VerifiedPrincipal(NamedTuple):
    """A principal that the directory vouches for until `until`, and how far what was presented reaches."""

    name: str
    kind: PrincipalKind
    until: datetime
    workspace: ObjectId | None = None
    actions: tuple[str, ...] | None = None
    token: str | None = None


class Directory(Protocol):
    """Answers whom a bearer credential belongs to; none if it is not one of this directory's.

    A credential that is this directory's but forged, expired or revoked raises Unauthenticated.
    """

    def verify(self, credential: str) -> VerifiedPrincipal | None: ...
