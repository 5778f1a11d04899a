"""Users, service accounts and groups in the database, and the roles that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, bindparam, delete, insert, select

from falaj.errors import Conflict
from falaj.governance import objects
from falaj.governance.policy.epochs import advance_epoch
from falaj.governance.tables import grants, group_members, principals
from falaj.governance.tables import objects as objects_table
from falaj.ports.metadata import Prepared, Transaction
from falaj.records.governance.identity import Grant, Group, Principal, PrincipalKind, Role, Workspace
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, PrincipalId, new_id

_disabled_at = Prepared(select(principals.c.disabled_at).where(principals.c.id == bindparam("id")))
_principals = objects.RowsByIds(select(principals), principals.c.id)
_members = objects.RowsByIds(
    select(group_members.c.group_id, objects_table.c.name)
    .join(group_members, group_members.c.member == objects_table.c.id)
    .order_by(objects_table.c.name),
    group_members.c.group_id,
)
_groups_of = select(group_members.c.group_id).where(group_members.c.member == bindparam("id"))
_held = Prepared(
    select(objects_table.c.name, grants.c.subject, grants.c.role)
    .join(objects_table, objects_table.c.id == grants.c.workspace)
    .where((grants.c.subject == bindparam("id")) | grants.c.subject.in_(_groups_of))
    .order_by(objects_table.c.name, grants.c.role)
)
_holders = Prepared(
    select(objects_table.c.id, objects_table.c.name).where(
        (objects_table.c.id == bindparam("id")) | objects_table.c.id.in_(_groups_of)
    )
)


def add_principal(
    tx: Transaction, name: str, *, kind: PrincipalKind, now: datetime, by: Sequence[str] = ()
) -> StoredObject:
    """Create a principal, which owns itself; `by` are those who act (none: the platform, at its first start)."""
    ident = new_id(kind)
    new = StoredObject(
        id=ident, workspace=ROOT, kind=kind, name=name, owner=PrincipalId(ident), created_at=now
    )
    objects.create(tx, new)
    tx.insert(principals, {"id": ident, "created_by": list(by)})
    return new


def is_disabled(tx: Transaction, ident: str) -> bool:
    rows = tx.fetch(_disabled_at, {"id": ident})
    return not rows or rows[0]["disabled_at"] is not None


def principal_record(tx: Transaction, found: StoredObject) -> Principal:
    return principal_records(tx, [found])[0]


def principal_records(tx: Transaction, page: Sequence[StoredObject]) -> list[Principal]:
    rows = _principals.fetch(tx, [each.id for each in page])
    enabled = {row["id"] for row in rows if row["disabled_at"] is None}
    return [
        Principal(
            id=PrincipalId(each.id),
            name=each.name,
            kind="service" if each.kind == "service" else "user",
            disabled=each.id not in enabled,
            created_at=each.created_at,
        )
        for each in page
    ]


def group_record(tx: Transaction, found: StoredObject) -> Group:
    return group_records(tx, [found])[0]


def group_records(tx: Transaction, page: Sequence[StoredObject]) -> list[Group]:
    members: dict[str, list[str]] = {each.id: [] for each in page}
    for row in _members.fetch(tx, [*members]):
        members[row["group_id"]].append(row["name"])
    return [Group(id=each.id, name=each.name, members=tuple(members[each.id])) for each in page]


def member_ids(tx: Transaction, group: str) -> Sequence[str]:
    return tx.execute(select(group_members.c.member).where(group_members.c.group_id == group)).scalars().all()


def require_administrator(tx: Transaction) -> None:
    """Raise Conflict if a change leaves the platform without an administrator who can act.

    The change advances the epoch first, so that two administrators who leave at once wait for each other.
    """
    held = select(grants.c.subject).where(grants.c.workspace == ROOT, grants.c.role == Role.ADMIN)
    through_groups = select(group_members.c.member).where(group_members.c.group_id.in_(held))
    able = select(principals.c.id).where(
        principals.c.disabled_at.is_(None), principals.c.id.in_(held) | principals.c.id.in_(through_groups)
    )
    if tx.execute(able.limit(1)).first() is None:
        raise Conflict("this would take the last administrator who can act from the platform")


def roles_held(tx: Transaction, ident: str) -> list[Grant]:
    """Return the roles of a principal, its own and those of its groups."""
    names = {row["id"]: row["name"] for row in tx.fetch(_holders, {"id": ident})}
    return [
        Grant(
            workspace=row["name"],
            subject=names.get(row["subject"], row["subject"]),
            role=Role(row["role"]),
        )
        for row in tx.fetch(_held, {"id": ident})
    ]


def grants_in(tx: Transaction, workspace: StoredObject) -> list[Grant]:
    """Return the roles that are held in `workspace`, by the name of the holder."""
    query = (
        select(objects_table.c.name, grants.c.role)
        .join(objects_table, objects_table.c.id == grants.c.subject)
        .where(grants.c.workspace == workspace.id)
        .order_by(objects_table.c.name, grants.c.role)
    )
    return [
        Grant(workspace=workspace.name, subject=name, role=Role(role)) for name, role in tx.execute(query)
    ]


def grant_role(
    tx: Transaction, workspace: str, subject: str, role: Role, *, now: datetime, by: Sequence[str] = ()
) -> None:
    """Give a role; `by` are those who act (none: the platform, at its first start)."""
    held = tx.execute(select(grants.c.role).where(*_same(workspace, subject, role))).first()
    if held is None:
        row = {"workspace": workspace, "subject": subject, "role": role}
        tx.execute(insert(grants), row | {"granted_by": list(by), "granted_at": now})
        advance_epoch(tx)


def revoke_role(tx: Transaction, workspace: str, subject: str, role: Role) -> bool:
    """Take a role away; false if it was not held."""
    advance_epoch(tx)  # first: it makes two administrators who leave at once wait for each other
    return tx.execute(delete(grants).where(*_same(workspace, subject, role))).rowcount > 0


def workspace_record(found: StoredObject) -> Workspace:
    return Workspace(id=found.id, name=found.name, created_at=found.created_at)


def _same(workspace: str, subject: str, role: Role) -> tuple[ColumnElement[bool], ...]:
    return grants.c.workspace == workspace, grants.c.subject == subject, grants.c.role == role
