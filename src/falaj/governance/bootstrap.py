"""Bootstrap at the first start: the root workspace, an administrator, service accounts and the first audit entry."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, insert, select

from falaj.governance import objects
from falaj.governance.audit.log import AuditLog
from falaj.governance.audit.merkle import Frontier
from falaj.governance.encryption.keyring import Keyring
from falaj.governance.identity.principals import add_principal, grant_role
from falaj.governance.tables import audit_state, epochs, principals
from falaj.governance.tables import objects as objects_table
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.names import DEFAULT_QUEUE, DEFAULT_WORKSPACE, ROOT, ObjectId, PrincipalId, new_id

_FIRST = "INSERT INTO governance_epochs (id, epoch) VALUES (1, 1) ON CONFLICT DO NOTHING RETURNING id"
"""The process that inserts this row bootstraps the platform; one that starts at the same time waits here."""


def is_bootstrapped(tx: Transaction) -> bool:
    return tx.execute(select(epochs.c.id)).first() is not None


def bootstrap(tx: Transaction, keyring: Keyring, *, administrator: str, now: datetime) -> None:
    """Create what must exist before the first operation, unless another process has just done so."""
    if not tx.execute_sql(_FIRST):
        return
    tip = {"id": 1, "log_id": new_id("log"), "size": 0, "frontier": Frontier().to_text()}
    tx.execute(insert(audit_state), tip)
    objects.create(tx, _workspace(ROOT, "platform", now))
    keyring.create(tx, ROOT, now=now)
    person = add_principal(tx, administrator, kind="user", now=now)
    controller = add_principal(tx, "controller", kind="service", now=now)
    create_service_account(tx, "model-server", Role.OPERATOR, now=now)
    objects.create(tx, _default_queue(now))
    default = _workspace(new_id("workspace"), DEFAULT_WORKSPACE, now, owner=person.id)
    objects.create(tx, default)
    keyring.create(tx, default.id, now=now)
    for role in (Role.ADMIN, Role.AUDITOR):
        grant_role(tx, ROOT, person.id, role, now=now)
    grant_role(tx, ROOT, controller.id, Role.OPERATOR, now=now)


def remember_home(tx: Transaction, ident: str) -> None:
    """Keep the id of a home that uses this database: without it nobody finds its keys and its witness."""
    tx.execute_sql("INSERT INTO governance_homes (id) VALUES (?) ON CONFLICT DO NOTHING", (ident,))


def create_service_account(tx: Transaction, name: str, role: Role, *, now: datetime) -> StoredObject:
    """Create a service account of the platform itself, with one role in every workspace."""
    account = add_principal(tx, name, kind="service", now=now)
    grant_role(tx, ROOT, account.id, role, now=now)
    return account


def record_service_account(tx: Transaction, log: AuditLog, *, name: str, now: datetime) -> None:
    """Append the audit entry of a service account that a newer version of the platform has."""
    entry = {
        "at": now,
        "caller": name,
        "action": "platform.bootstrap",
        "outcome": "done",
        "objects": [ROOT],
        "workspace": ROOT,
        "origin": "local",
        "rule": "first start",
        "input": log.digest(b""),
    }
    log.append(tx, [entry])


def count_users(tx: Transaction) -> int:
    """Return the number of users who are not disabled."""
    query = (
        select(func.count())
        .select_from(principals.join(objects_table, objects_table.c.id == principals.c.id))
        .where(objects_table.c.kind == "user", principals.c.disabled_at.is_(None))
    )
    return int(tx.execute(query).scalar_one())


def _default_queue(now: datetime) -> StoredObject:
    """Return the queue of jobs that name none; it cannot be removed."""
    return StoredObject(
        id=DEFAULT_QUEUE,
        workspace=ROOT,
        kind="queue",
        name="default",
        owner=PrincipalId(ROOT),
        created_at=now,
    )


def _workspace(ident: str, name: str, now: datetime, *, owner: str = ROOT) -> StoredObject:
    return StoredObject(
        id=ObjectId(ident),
        workspace=ROOT,
        kind="workspace",
        name=name,
        owner=PrincipalId(owner),
        created_at=now,
    )
