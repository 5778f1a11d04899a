"""The port for directories, which verify credentials: built-in tokens, and later OIDC."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple, Protocol

from falaj.records.governance.identity import PrincipalKind
from falaj.records.names import ObjectId


class VerifiedPrincipal(NamedTuple):
    """The principal that a credential belongs to, and what the credential is limited to.

    The result may be used until `until`. `workspace` and `actions` restrict it; none means no restriction.
    """

    name: str
    kind: PrincipalKind
    until: datetime
    workspace: ObjectId | None = None
    actions: tuple[str, ...] | None = None
    token: str | None = None


class Directory(Protocol):
    """Verifies bearer credentials of one kind."""

    def verify(self, credential: str) -> VerifiedPrincipal | None:
        """Return the principal of `credential`, or none if another directory issued it.

        Raise Unauthenticated if it was issued here and is forged, expired or revoked.
        """
        ...
