"""The objects of a list that a caller may see: as conditions of the query, and exactly, object by object."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, false, or_

from falaj.governance.operations.caller import Caller
from falaj.governance.policy.authorizer import Authorizer
from falaj.governance.policy.relevance import OWN
from falaj.governance.tables import objects
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import UNRESTRICTED
from falaj.records.names import ObjectId, PrincipalId

MAX_EXCLUDED = 32
"""Groups of hidden objects that a query leaves out; further ones are read, and then left out."""

CACHE_LIMIT = 10_000
"""Callers and actions for which such groups are remembered."""

_IN_QUERY = frozenset({OWN, "owner", "zone", "classes", "jurisdictions"})
"""What a condition can tell apart; names and identities are looked at object by object."""


class Visibility:
    """What `caller` may do `action` on, in one transaction.

    Rules look at few attributes, so objects fall into few groups, each with one decision. A query leaves out the groups
    that are known to be hidden; `allows` decides on every object that it returns all the same.
    """

    def __init__(self, authorizer: Authorizer, tx: Transaction, caller: Caller, action: str) -> None:
        self._authorizer = authorizer
        self._state = authorizer.state(tx)
        self._tx = tx
        self._caller = caller
        self._action = action
        self._excluded = self._known_to_be_hidden()

    def allows(self, found: StoredObject) -> bool:
        """Tell whether the caller may do the action on `found`."""
        decision = self._authorizer.decide_in(self._state, self._tx, self._caller, self._action, found)
        if not decision.allowed and len(self._excluded) < MAX_EXCLUDED:
            self._exclude(found)
        return decision.allowed

    def conditions(self, kinds: tuple[str, ...], workspace: str | None) -> list[ColumnElement[bool]]:
        """Return conditions on objects of `kinds`, in one workspace or in all, that no visible object fails."""
        known = self._by_owner(kinds, workspace)
        return [*self._excluded.values()] if known is None else known

    def _known_to_be_hidden(self) -> dict[tuple[Any, ...], ColumnElement[bool]]:
        """Return conditions that were found in this epoch, by the group that each leaves out."""
        known, caller = self._state.hidden, self._caller
        if len(known) >= CACHE_LIMIT:
            known.clear()
        return known.setdefault(
            (caller.id, caller.origin, caller.workspace, caller.actions, self._action), {}
        )

    def _by_owner(self, kinds: tuple[str, ...], workspace: str | None) -> list[ColumnElement[bool]] | None:
        """Return the conditions where ownership alone decides; none where more does."""
        if workspace is None or "workspace" in kinds or self._caller.kind in kinds:
            return None
        if not self._state.engine.kinds.issuperset(kinds):  # a kind that a caller made up: there is nothing
            return None
        if not {OWN}.issuperset(self._state.engine.reads(self._action, workspace)):
            return None
        me = self._caller.id
        own, others = ([self.allows(_sample(kind, workspace, owner)) for kind in kinds] for owner in (me, ""))
        if all(own) and all(others):
            return []
        if not any(own) and not any(others):
            return [false()]
        if all(own) and not any(others):
            return [objects.c.owner == me]
        return None

    def _exclude(self, found: StoredObject) -> None:
        reads = self._state.engine.reads(self._action, found.home)
        if found.kind == "workspace" or str(found.id) == self._caller.id or not _IN_QUERY.issuperset(reads):
            return
        key = (*self._state.engine.profile(self._caller.id, self._action, found), found.label)
        if key not in self._excluded:
            self._excluded[key] = or_(*self._differs(found, reads))

    def _differs(self, found: StoredObject, reads: tuple[str, ...]) -> list[ColumnElement[bool]]:
        """Return conditions of which an object meets one unless it is in the same group as `found`."""
        differs = [objects.c.kind != found.kind, objects.c.workspace != found.workspace]
        if OWN in reads:
            mine = found.owner == self._caller.id
            differs.append(objects.c.owner != self._caller.id if mine else objects.c.owner == self._caller.id)
        if "owner" in reads:
            differs.append(objects.c.owner != found.owner)
        if "zone" in reads:
            differs.append(objects.c.zone.is_distinct_from(found.zone))
        if not {"classes", "jurisdictions"}.isdisjoint(reads):
            stored = objects.c.label != found.label.model_dump(mode="json")
            differs.append(
                stored if found.label == UNRESTRICTED else or_(stored, objects.c.label.is_(None))
            )  # what has no label may be stored as null
        return differs


def _sample(kind: str, workspace: str, owner: str) -> StoredObject:
    """Return an object that differs from others in nothing but kind, workspace and owner."""
    return StoredObject.model_construct(
        id=ObjectId(""),
        workspace=ObjectId(workspace),
        kind=kind,
        name="",
        owner=PrincipalId(owner),
        zone=None,
        label=UNRESTRICTED,
        own_label=UNRESTRICTED,
        created_at=datetime.min.replace(tzinfo=UTC),
    )
