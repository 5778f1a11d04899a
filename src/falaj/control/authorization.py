"""For whom the controller acts: whoever asked for something, as they stand now, or itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from falaj.errors import Denied
from falaj.governance import objects
from falaj.governance.identity.directory import is_still_valid
from falaj.governance.identity.tokens import caller_for
from falaj.governance.operations.caller import Caller, acting_as, on_terms
from falaj.ports.metadata import Database, Transaction
from falaj.records.names import ROOT


def requester(tx: Transaction, row: Mapping[str, Any], *, origin: str) -> Caller:
    """Who asked for what `row` tells of, with the limits of the token that they came with; Denied if they are gone."""
    person = objects.by_id(tx, row["behalf"])
    if person is None:
        raise Denied("whoever asked for this work is gone")
    caller = replace(
        caller_for(person, origin=origin),
        workspace=row["scope"],
        actions=None if row["actions"] is None else tuple(row["actions"]),
        token=row["token"],
    )
    if not is_still_valid(tx, caller, None):
        raise Denied("whoever asked for this work may no longer act")
    return caller


def controller_caller(database: Database) -> Caller:
    """The service that does the bookkeeping."""
    with database.read() as tx:
        me = objects.resolve(tx, "controller", kind="user", workspace=ROOT)
    return caller_for(me, origin="controller")


@contextmanager
def acting(caller: Caller, *, fence: int) -> Iterator[None]:
    """Operations inside are performed for `caller`, and only while the lease is ours."""
    with acting_as(caller), on_terms(fence=fence):
        yield
