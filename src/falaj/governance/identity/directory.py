"""Authentication: the built-in directory of the platform's own tokens, and the chain of directories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from falaj.errors import Unauthenticated
from falaj.governance import objects
from falaj.governance.identity import tokens
from falaj.governance.identity.principals import is_disabled
from falaj.governance.operations.caller import Caller
from falaj.ports.directory import Directory, VerifiedPrincipal
from falaj.ports.metadata import Database, Transaction
from falaj.records.names import ROOT, PrincipalId

REFUSED = (
    "the token is unknown, expired or revoked; ask an administrator for a new one (falaj tokens issue --user YOU), or "
    "run 'falaj login' on its machine as the owner of the home"
)
"""The same message whatever is wrong with the token."""


def is_still_valid(tx: Transaction, caller: Caller, now: datetime | None) -> bool:
    """Tell whether an authenticated caller may still act: enabled, its token neither revoked nor expired.

    Without `now` an expired token is accepted: work that was requested in time goes on.
    """
    over = caller.token is not None and tokens.is_over(tx, caller.token, now=now)
    return not over and not is_disabled(tx, caller.id)


class BuiltInDirectory:
    """Recognizes the platform's own tokens."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def verify(self, credential: str) -> VerifiedPrincipal | None:
        if not credential.startswith(tokens.PREFIX):
            return None
        with self._database.read() as tx:
            found = tokens.recognize(tx, credential, now=self._clock())
        if found is None:
            raise Unauthenticated(REFUSED)
        return found


class Authenticator:
    """Authenticates a credential by the first directory that recognizes it."""

    def __init__(self, directories: Sequence[Directory], database: Database) -> None:
        self._directories = tuple(directories)
        self._database = database

    def authenticate(self, credential: str, *, origin: str) -> tuple[Caller, datetime]:
        """Return the caller, and until when it is authenticated; raise Unauthenticated if no directory knows it."""
        answers = (directory.verify(credential) for directory in self._directories)
        found = next((answer for answer in answers if answer is not None), None)
        if found is None:
            raise Unauthenticated(REFUSED)
        return self._caller(found, origin), found.until

    def _caller(self, found: VerifiedPrincipal, origin: str) -> Caller:
        with self._database.read() as tx:
            person = objects.by_name(tx, workspace=ROOT, kind=found.kind, name=found.name)
            if person is None or is_disabled(tx, person.id):
                raise Unauthenticated(REFUSED)
        return Caller(
            id=PrincipalId(person.id),
            name=person.name,
            kind=found.kind,
            origin=origin,
            workspace=found.workspace,
            actions=found.actions,
            token=found.token,
        )
