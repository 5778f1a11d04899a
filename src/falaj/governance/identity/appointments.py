"""Who made a principal what it is: who created it, granted its roles, put it into groups and issued its tokens.

Someone depends on a person if that person, directly or through others, created them, issued the token that they use, or
stands in every way in which they came by their role. What was not recorded counts as dependence. Decision 0021.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select

from falaj.governance import objects
from falaj.governance.operations.caller import Caller
from falaj.governance.tables import grants, group_members, principals, tokens
from falaj.governance.tables import objects as objects_table
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Appointment, Role
from falaj.records.names import ROOT

UNKNOWN = "unknown"
"""Stands for whoever acted before it was recorded: nobody is independent of them."""


def actors(tx: Transaction, caller: Caller) -> list[str]:
    """Return who acts: the caller, and everyone else who could hold the credential that it uses."""
    return list(dict.fromkeys([caller.id, *caller.vouchers, *_vouchers(tx, caller)]))


def people_behind(tx: Transaction, ident: str) -> set[str]:
    """Return a principal, who issued tokens for it, and for a service account also who made it."""
    found, left = {ident}, [ident]
    while left:
        each = left.pop()
        vouched = select(tokens.c.vouched_by).where(tokens.c.principal == each)
        people = [issuers[0] for issuers in tx.execute(vouched).scalars() if issuers]
        if is_service_account(tx, each):
            people += _creators(tx, each)[:1]
        left += [person for person in people if person not in found and is_service_account(tx, person)]
        found.update(people)
    return found


def is_service_account(tx: Transaction, ident: str) -> bool:
    """Tell whether a principal is no person."""
    account = objects.ever(tx, ident)
    return account is not None and account.kind == "service"


def holders(tx: Transaction, role: Role, workspace: str) -> list[str]:
    """Return the people, not disabled, who hold `role` in `workspace`, by name."""
    held = select(grants.c.subject).where(grants.c.role == role, grants.c.workspace.in_([workspace, ROOT]))
    members = select(group_members.c.member).where(group_members.c.group_id.in_(held))
    query = (
        select(principals.c.id)
        .join(objects_table, objects_table.c.id == principals.c.id)
        .where(
            principals.c.disabled_at.is_(None),
            objects_table.c.kind == "user",
            principals.c.id.in_(held) | principals.c.id.in_(members),
        )
        .order_by(objects_table.c.name)
    )
    return list(tx.execute(query).scalars())


@dataclass(frozen=True)
class _Way:
    """One way by which a principal holds a role: a grant to it, or to a group that it is in."""

    workspace: str
    granted_by: Sequence[str] | None
    granted_at: datetime | None
    group: str | None = None
    added_by: Sequence[str] | None = ()
    added_at: datetime | None = None

    def people(self) -> Sequence[str]:
        given = [UNKNOWN] if self.granted_by is None else self.granted_by
        return [*given, *([UNKNOWN] if self.added_by is None else self.added_by)]


class Independence:
    """Tells who came by a role in `workspace` without `authors`."""

    def __init__(self, tx: Transaction, authors: Collection[str], *, workspace: str) -> None:
        self._tx = tx
        self._authors = frozenset(authors)
        self._workspace = workspace
        self._known: dict[tuple[str, Role], bool] = {}
        self._asked: set[tuple[str, Role]] = set()

    def of_caller(self, caller: Caller, role: Role) -> bool:
        """Tell whether the caller holds `role` independently, and uses a credential that no author could hold."""
        others = [each for each in actors(self._tx, caller) if each != caller.id]
        return self.holds(caller.id, role) and all(self._is_free(each) for each in others)

    def holds(self, ident: str, role: Role) -> bool:
        """Tell whether a principal exists, and holds `role`, without the authors."""
        ways = ways_to(self._tx, ident, role, self._workspace)
        return self._was_created_freely(ident) and any(self._is_free_way(way) for way in ways)

    def _is_free(self, ident: str) -> bool:
        """Tell whether someone who appointed others is independent; one who is no administrator any more may be."""
        key = (ident, Role.ADMIN)
        if key in self._known:
            return self._known[key]
        if ident == UNKNOWN or key in self._asked:  # a way that leads back to itself founds nothing
            return False
        self._asked.add(key)
        ways = ways_to(self._tx, ident, Role.ADMIN, self._workspace)
        free = self._was_created_freely(ident) and (not ways or any(self._is_free_way(way) for way in ways))
        self._asked.discard(key)
        self._known[key] = free
        return free

    def _is_free_way(self, way: _Way) -> bool:
        return all(self._is_free(each) for each in way.people())

    def _was_created_freely(self, ident: str) -> bool:
        return ident not in self._authors and all(
            self._is_free(each) for each in _creators(self._tx, ident) if each != ident
        )


def appointment(
    tx: Transaction, caller: Caller, role: Role, *, workspace: str, found: Independence
) -> Appointment | None:
    """Return how the caller came to hold `role`, by the most independent way; None if a policy alone permits it."""
    ways = ways_to(tx, caller.id, role, workspace)
    way = next((each for each in ways if found._is_free_way(each)), ways[0] if ways else None)
    person = objects.ever(tx, caller.id)
    if way is None or person is None:
        return None
    others = [each for each in actors(tx, caller) if each != caller.id]
    return Appointment(
        role=role,
        workspace=objects.name_of(tx, way.workspace),
        granted_by=_names(tx, way.granted_by),
        granted_at=way.granted_at,
        group=None if way.group is None else objects.name_of(tx, way.group),
        added_by=None if way.group is None else _names(tx, way.added_by),
        added_at=way.added_at,
        created_by=_names(tx, _created_by(tx, caller.id)),
        created_at=person.created_at,
        credential_by=None if UNKNOWN in others else _names(tx, others),
    )


def ways_to(tx: Transaction, ident: str, role: Role, workspace: str) -> list[_Way]:
    """Return the ways by which a principal holds `role` in `workspace`, the oldest first."""
    places = grants.c.role == role, grants.c.workspace.in_([workspace, ROOT])
    own = select(grants).where(*places, grants.c.subject == ident)
    through = (
        select(grants, group_members.c.added_by, group_members.c.added_at, objects_table.c.owner)
        .join(group_members, group_members.c.group_id == grants.c.subject)
        .join(objects_table, objects_table.c.id == grants.c.subject)
        .where(*places, group_members.c.member == ident, objects_table.c.deleted_at.is_(None))
    )
    ways = [
        _Way(row["workspace"], row["granted_by"], row["granted_at"]) for row in tx.execute(own).mappings()
    ]
    ways += [_through_group(row) for row in tx.execute(through).mappings()]
    return sorted(ways, key=lambda way: (way.granted_at is None, way.granted_at))


def _through_group(row: Any) -> _Way:
    added_by = None if row["added_by"] is None else [*row["added_by"], row["owner"]]
    return _Way(
        row["workspace"],
        row["granted_by"],
        row["granted_at"],
        group=row["subject"],
        added_by=added_by,
        added_at=row["added_at"],
    )


def _created_by(tx: Transaction, ident: str) -> list[str] | None:
    made: list[str] | None = tx.execute(
        select(principals.c.created_by).where(principals.c.id == ident)
    ).scalar()
    return made


def _creators(tx: Transaction, ident: str) -> list[str]:
    made = _created_by(tx, ident)
    return [UNKNOWN] if made is None else made


def _vouchers(tx: Transaction, caller: Caller) -> list[str]:
    if caller.token is None:
        return []
    found: list[str] | None = tx.execute(
        select(tokens.c.vouched_by).where(tokens.c.id == caller.token)
    ).scalar()
    return [UNKNOWN] if found is None else found


def _names(tx: Transaction, idents: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if idents is None else tuple(objects.name_of(tx, each) for each in dict.fromkeys(idents))
