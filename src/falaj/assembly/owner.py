"""The token of the owner of a home, with which the local command line calls the platform that runs on it."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime, timedelta
from typing import NamedTuple

from falaj.assembly.home import Home
from falaj.assembly.platform import LocalPlatform, assemble, local_caller
from falaj.governance.identity.tokens import in_use
from falaj.governance.operations.caller import acting_as

PURPOSE = "local command line"
LIFETIME = timedelta(days=30)


class OwnerToken(NamedTuple):
    secret: str
    expires_at: datetime


def issue_owner_token(platform: LocalPlatform) -> OwnerToken:
    """Issue a token for the local user; raise NotFound if the platform has no such user."""
    with acting_as(local_caller(platform.database)):
        issued = platform.services.tokens.issue(purpose=_purpose(platform.home), expires_in=LIFETIME)
    return OwnerToken(issued.secret, issued.token.expires_at)


def revoke_owner_tokens(platform: LocalPlatform) -> None:
    """Revoke the tokens of earlier starts; work that was asked for with them goes on."""
    owner = local_caller(platform.database)
    with platform.database.read() as tx:
        earlier = in_use(tx, owner.id, purpose=_purpose(platform.home), now=platform.gate.clock())
    with acting_as(owner):
        for token in earlier:
            platform.services.tokens.revoke(token, keep_work=True)


def renew_owner_token(home: Home) -> OwnerToken:
    """Issue a token without asking the platform that runs on `home`: whoever owns its files owns the platform.

    It is recorded in the audit log as any other token. The earlier one stays valid until it expires: a command may
    be using it.
    """
    with closing(assemble(home)) as platform:
        return issue_owner_token(platform)


def _purpose(home: Home) -> str:
    return f"{PURPOSE}, {home.ident}"
