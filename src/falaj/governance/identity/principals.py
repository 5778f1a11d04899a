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
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Grant, Group, Principal, PrincipalKind, Role, Workspace
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, PrincipalId, new_id

_disabled_at = select(principals.c.disabled_at).where(principals.c.id == bindparam("id"))


def add_principal(tx: Transaction, name: str, *, kind: PrincipalKind, now: datetime) -> StoredObject:
    """Create a principal, which owns itself."""
    ident = new_id(kind)
    new = StoredObject(
        id=ident, workspace=ROOT, kind=kind, name=name, owner=PrincipalId(ident), created_at=now
    )
    objects.create(tx, new)
    tx.execute(insert(principals), {"id": ident})
    return new


def is_disabled(tx: Transaction, ident: str) -> bool:
    row = tx.execute(_disabled_at, {"id": ident}).first()
    return row is None or row[0] is not None


def principal_record(tx: Transaction, found: StoredObject) -> Principal:
    return Principal(
        id=PrincipalId(found.id),
        name=found.name,
        kind="service" if found.kind == "service" else "user",
        disabled=is_disabled(tx, found.id),
        created_at=found.created_at,
    )


def group_record(tx: Transaction, found: StoredObject) -> Group:
    query = (
        select(objects_table.c.name)
        .join(group_members, group_members.c.member == objects_table.c.id)
        .where(group_members.c.group_id == found.id)
        .order_by(objects_table.c.name)
    )
    return Group(id=found.id, name=found.name, members=tuple(tx.execute(query).scalars()))


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
    groups = select(group_members.c.group_id).where(group_members.c.member == ident)
    query = (
        select(objects_table.c.name, grants.c.subject, grants.c.role)
        .join(objects_table, objects_table.c.id == grants.c.workspace)
        .where((grants.c.subject == ident) | grants.c.subject.in_(groups))
        .order_by(objects_table.c.name, grants.c.role)
    )
    names = {
        row.id: row.name
        for row in tx.execute(
            select(objects_table.c.id, objects_table.c.name).where(
                (objects_table.c.id == ident) | objects_table.c.id.in_(groups)
            )
        )
    }
    return [
        Grant(workspace=workspace, subject=names.get(subject, subject), role=Role(role))
        for workspace, subject, role in tx.execute(query)
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


def grant_role(tx: Transaction, workspace: str, subject: str, role: Role) -> None:
    held = tx.execute(select(grants.c.role).where(*_same(workspace, subject, role))).first()
    if held is None:
        tx.execute(insert(grants), {"workspace": workspace, "subject": subject, "role": role})
        advance_epoch(tx)


def revoke_role(tx: Transaction, workspace: str, subject: str, role: Role) -> bool:
    """Take a role away; false if it was not held."""
    advance_epoch(tx)  # first: it makes two administrators who leave at once wait for each other
    return tx.execute(delete(grants).where(*_same(workspace, subject, role))).rowcount > 0


def workspace_record(found: StoredObject) -> Workspace:
    return Workspace(id=found.id, name=found.name, created_at=found.created_at)


def _same(workspace: str, subject: str, role: Role) -> tuple[ColumnElement[bool], ...]:
    return grants.c.workspace == workspace, grants.c.subject == subject, grants.c.role == role
