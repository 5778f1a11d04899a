"""Who is who: turns what a caller presents into a principal. Built-in tokens today, OIDC beside them later."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from falaj.records.identity import PrincipalKind


class Recognized(NamedTuple):
    """A principal that the directory vouches for, and the scope of what was presented."""

    name: str
    kind: PrincipalKind
    workspace: str | None = None
    actions: tuple[str, ...] | None = None
    token: str | None = None


class Directory(Protocol):
    """Answers whom a bearer credential belongs to; none if it is not one of this directory's.

    A credential that is this directory's but forged, expired or revoked raises Unauthenticated.
    """

    def recognize(self, credential: str) -> Recognized | None: ...
