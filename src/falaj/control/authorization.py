"""Callers that the controller acts for: the requester of a job or of work, and the controller itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from falaj.errors import Denied
from falaj.governance import objects
from falaj.governance.identity.directory import is_still_valid
from falaj.governance.identity.tokens import caller_for
from falaj.governance.operations.caller import Caller, acting_as, on_terms
from falaj.ports.metadata import Database, Transaction
from falaj.records.names import ROOT, ObjectId


class Requested(Protocol):
    """A stored request: who made it, and the limits of the token that they presented."""

    @property
    def behalf(self) -> ObjectId: ...

    @property
    def scope(self) -> ObjectId | None: ...

    @property
    def actions(self) -> tuple[str, ...] | None: ...

    @property
    def token(self) -> str | None: ...


def requester(tx: Transaction, request: Requested, *, origin: str) -> Caller:
    """Return who made `request`, within the limits of their token; Denied if they are gone or may no longer act."""
    person = objects.by_id(tx, request.behalf)
    if person is None:
        raise Denied("the user who requested this work is gone")
    caller = replace(
        caller_for(person, origin=origin),
        workspace=request.scope,
        actions=request.actions,
        token=request.token,
    )
    if not is_still_valid(tx, caller, None):
        raise Denied("the user who requested this work may no longer act")
    return caller


def controller_caller(database: Database, *, origin: str = "controller") -> Caller:
    """Return the service user of the controller."""
    with database.read() as tx:
        me = objects.resolve(tx, "controller", kind="user", workspace=ROOT)
    return caller_for(me, origin=origin)


@contextmanager
def acting(caller: Caller, *, fence: int) -> Iterator[None]:
    """Perform operations inside on behalf of `caller`, and only while the lease with `fence` holds."""
    with acting_as(caller), on_terms(fence=fence):
        yield
