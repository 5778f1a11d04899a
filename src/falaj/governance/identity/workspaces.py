"""Workspaces: each owns its names, keys and roles."""

from __future__ import annotations

from sqlalchemy import ColumnElement, delete, insert, select

from falaj.errors import Conflict
from falaj.governance import objects
from falaj.governance.encryption.keyring import Keyring
from falaj.governance.identity.users import keep_an_administrator
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_page
from falaj.governance.policy.epochs import advance_epoch
from falaj.governance.tables import grants
from falaj.governance.tables import objects as objects_table
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Grant, Role, Workspace
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import ROOT, Name, SubjectRef, WorkspaceRef


class Workspaces:
    """Make workspaces, and say who holds which role in them."""

    def __init__(self, gate: Gate, keyring: Keyring) -> None:
        self.gate = gate
        self._keyring = keyring

    @operation("workspaces.create", resource="platform", allow=Role.ADMIN)
    def create(self, name: Name) -> Workspace:
        """Make a workspace with a data key of its own; you become its administrator."""
        call = current_call()
        root = objects.resolve(call.tx, ROOT, kind="workspace", workspace=ROOT)
        new = call.create("workspace", name, workspace=root)
        self._keyring.create(call.tx, new.id, now=call.now)
        grant_role(call.tx, new.id, call.caller.id, Role.ADMIN)
        return workspace_record(new)

    @operation("workspaces.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self, *, after: Cursor = "", limit: PageSize = 100) -> Page[Workspace]:
        """The workspaces that you may see."""
        return list_page(self.gate, ["workspace"], workspace_record, after=after, limit=limit)

    @operation("workspaces.show", resource="workspace", mode=Mode.READ)
    def show(self, workspace: WorkspaceRef) -> Workspace:
        """One workspace."""
        return workspace_record(current_call().target)

    @operation("workspaces.grant", resource="workspace", allow=Role.ADMIN)
    def grant(self, workspace: WorkspaceRef, subject: SubjectRef, *, role: Role) -> Grant:
        """Give a user, service account or group a role in a workspace (`platform`: in every workspace)."""
        call = current_call()
        grant_role(call.tx, call.target.id, call.object("subject").id, role)
        return Grant(workspace=call.target.name, subject=call.object("subject").name, role=role)

    @operation("workspaces.revoke", resource="workspace", allow=Role.ADMIN)
    def revoke(self, workspace: WorkspaceRef, subject: SubjectRef, *, role: Role) -> Grant:
        """Take a role away again; the last administrator of the platform stays."""
        call = current_call()
        taken = Grant(workspace=call.target.name, subject=call.object("subject").name, role=role)
        keys = (call.target.id, call.object("subject").id, role)
        advance_epoch(call.tx)  # first: it makes two administrators who leave at once wait for each other
        gone = call.tx.execute(delete(grants).where(*_same(*keys)))
        if gone.rowcount == 0:
            raise Conflict(f"{taken.subject} does not hold the role {role} in {taken.workspace}")
        keep_an_administrator(call.tx)
        return taken

    @operation("workspaces.roles", resource="workspace", mode=Mode.READ)
    def roles(self, workspace: WorkspaceRef) -> tuple[Grant, ...]:
        """Who holds which role in a workspace."""
        call = current_call()
        query = (
            select(objects_table.c.name, grants.c.role)
            .join(objects_table, objects_table.c.id == grants.c.subject)
            .where(grants.c.workspace == call.target.id)
            .order_by(objects_table.c.name, grants.c.role)
        )
        return tuple(
            Grant(workspace=call.target.name, subject=name, role=Role(role))
            for name, role in call.tx.execute(query)
        )


def grant_role(tx: Transaction, workspace: str, subject: str, role: Role) -> None:
    held = tx.execute(select(grants.c.role).where(*_same(workspace, subject, role))).first()
    if held is None:
        tx.execute(insert(grants), {"workspace": workspace, "subject": subject, "role": role})
        advance_epoch(tx)


def workspace_record(found: StoredObject) -> Workspace:
    return Workspace(id=found.id, name=found.name, created_at=found.created_at)


def _same(workspace: str, subject: str, role: Role) -> tuple[ColumnElement[bool], ...]:
    return grants.c.workspace == workspace, grants.c.subject == subject, grants.c.role == role
