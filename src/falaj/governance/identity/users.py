"""Users, service accounts and groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import bindparam, delete, insert, select, update

from falaj.errors import Conflict
from falaj.governance import objects
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_page
from falaj.governance.policy.epochs import advance_epoch
from falaj.governance.tables import grants, group_members, principals
from falaj.governance.tables import objects as objects_table
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Grant, Group, Identity, Principal, PrincipalKind, Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import ROOT, GroupRef, Name, PrincipalId, UserRef, new_id

_disabled_at = select(principals.c.disabled_at).where(principals.c.id == bindparam("id"))


class Users:
    """People and service accounts."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("users.create", resource="platform", allow=Role.ADMIN)
    def create(self, name: Name, *, kind: PrincipalKind = "user") -> Principal:
        """Make a user or a service account; it can do nothing until it is granted a role."""
        call = current_call()
        taken = objects.by_name(
            call.tx, workspace=ROOT, kind="service" if kind == "user" else "user", name=name
        )
        if taken is not None:
            raise Conflict(f"{name!r} is the name of a {taken.kind} already")
        return principal_record(call.tx, add_principal(call.tx, name, kind=kind, now=call.now))

    @operation("users.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self, *, after: Cursor = "", limit: PageSize = 100) -> Page[Principal]:
        """Users and service accounts."""
        tx = current_call().tx
        kinds = ["user", "service"]
        return list_page(
            self.gate, kinds, lambda found: principal_record(tx, found), after=after, limit=limit
        )

    @operation("users.show", resource="user", mode=Mode.READ, allow="anyone")
    def show(self, user: UserRef) -> Principal:
        """One user or service account."""
        return principal_record(current_call().tx, current_call().target)

    @operation("users.whoami", resource="user", mode=Mode.READ, allow={"owner"})
    def whoami(self, *, user: UserRef | None = None) -> Identity:
        """Who you are to the platform, which roles you hold, and how far your token reaches."""
        call = current_call()
        scope = call.caller.workspace and objects.by_id(call.tx, call.caller.workspace)
        return Identity(
            principal=principal_record(call.tx, call.target),
            grants=tuple(roles_held(call.tx, call.target.id)),
            workspace=scope.name if scope else None,
            actions=call.caller.actions,
        )

    @operation("users.disable", resource="user", allow=Role.ADMIN)
    def disable(self, user: UserRef) -> Principal:
        """Refuse a user from now on, with every token that it has. Undo: users.enable."""
        call = current_call()
        if str(call.target.id) == call.caller.id:
            raise Conflict("you cannot disable yourself; another administrator can")
        return self._set_disabled(call.now)

    @operation("users.enable", resource="user", allow=Role.ADMIN)
    def enable(self, user: UserRef) -> Principal:
        """Let a disabled user in again."""
        return self._set_disabled(None)

    def _set_disabled(self, at: datetime | None) -> Principal:
        call = current_call()
        advance_epoch(call.tx)
        call.tx.execute(update(principals).where(principals.c.id == call.target.id).values(disabled_at=at))
        keep_an_administrator(call.tx)
        return principal_record(call.tx, call.target)


class Groups:
    """Groups of users: a role granted to a group is held by its members."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("groups.create", resource="platform", allow=Role.ADMIN)
    def create(self, name: Name) -> Group:
        """Make an empty group."""
        call = current_call()
        root = objects.resolve(call.tx, ROOT, kind="workspace", workspace=ROOT)
        return Group(id=call.create("group", name, workspace=root).id, name=name)

    @operation("groups.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self, *, after: Cursor = "", limit: PageSize = 100) -> Page[Group]:
        """The groups and their members."""
        tx = current_call().tx
        return list_page(
            self.gate, ["group"], lambda found: group_record(tx, found), after=after, limit=limit
        )

    @operation("groups.add", resource="group", allow=Role.ADMIN)
    def add(self, group: GroupRef, user: UserRef) -> Group:
        """Put a user or service account into a group."""
        call = current_call()
        member = {"group_id": call.target.id, "member": call.object("user").id}
        if member["member"] not in _member_ids(call.tx, call.target.id):
            call.tx.execute(insert(group_members), member)
            advance_epoch(call.tx)
        return group_record(call.tx, call.target)

    @operation("groups.remove", resource="group", allow=Role.ADMIN)
    def remove(self, group: GroupRef, user: UserRef) -> Group:
        """Take a user or service account out of a group."""
        call = current_call()
        advance_epoch(call.tx)
        call.tx.execute(
            delete(group_members).where(
                group_members.c.group_id == call.target.id, group_members.c.member == call.object("user").id
            )
        )
        keep_an_administrator(call.tx)
        return group_record(call.tx, call.target)


def add_principal(tx: Transaction, name: str, *, kind: PrincipalKind, now: datetime) -> StoredObject:
    """A new principal, who owns itself."""
    ident = new_id(kind)
    new = StoredObject(
        id=ident, workspace=ROOT, kind=kind, name=name, owner=PrincipalId(ident), created_at=now
    )
    objects.create(tx, new)
    tx.execute(insert(principals), {"id": ident})
    return new


def keep_an_administrator(tx: Transaction) -> None:
    """Refuse a change that leaves the platform without an administrator who can act.

    The change advances the epoch before it looks, so that two who leave at once wait for each other.
    """
    held = select(grants.c.subject).where(grants.c.workspace == ROOT, grants.c.role == Role.ADMIN)
    through_groups = select(group_members.c.member).where(group_members.c.group_id.in_(held))
    able = select(principals.c.id).where(
        principals.c.disabled_at.is_(None), principals.c.id.in_(held) | principals.c.id.in_(through_groups)
    )
    if tx.execute(able.limit(1)).first() is None:
        raise Conflict("this would take the last administrator who can act from the platform")


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


def roles_held(tx: Transaction, ident: str) -> list[Grant]:
    """The roles of a principal, its own and those of its groups."""
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


def group_record(tx: Transaction, found: StoredObject) -> Group:
    query = (
        select(objects_table.c.name)
        .join(group_members, group_members.c.member == objects_table.c.id)
        .where(group_members.c.group_id == found.id)
        .order_by(objects_table.c.name)
    )
    return Group(id=found.id, name=found.name, members=tuple(tx.execute(query).scalars()))


def _member_ids(tx: Transaction, group: str) -> Sequence[str]:
    return tx.execute(select(group_members.c.member).where(group_members.c.group_id == group)).scalars().all()
