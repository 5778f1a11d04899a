"""Secrets: set, listed and removed by people, and opened for nobody but the jobs of those who may use them.

A value is encrypted under its workspace's key and bound to its name; what the audit log keeps of a call is made without
it, so that nobody can try out values against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, select, update

from falaj.errors import Denied, FalajError, Fault, KeyUnavailable, NotFound
from falaj.governance import objects
from falaj.governance.encryption.keyring import has_living_key, require_living_key
from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_workspace_page
from falaj.governance.tables import secrets
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.governance.secrets import Secret, SecretRef, SecretValue
from falaj.records.names import Name, ObjectId, WorkspaceRef

USE = "secrets.use"


class Secrets:
    """Values that jobs find in their environment. No operation gives one back."""

    def __init__(self, gate: Gate, sealed: SealedValues) -> None:
        self.gate = gate
        self._sealed = sealed

    @operation("secrets.set", resource="workspace", mode=Mode.LATE)
    def set(self, name: Name, value: SecretValue, *, workspace: WorkspaceRef | None = None) -> Secret:
        """Keep a value under a name, in place of the one that it had. Jobs use it from their next attempt on."""
        call, data = current_call(), value.encode()
        call.content = self.gate.audit.digest(
            data
        )  # another value is another call, though the log has neither
        home = call.target.id
        sealed = self._sealed.seal(home, data, context=_context(home, name))

        def publish() -> Secret:
            require_living_key(call.tx, home)
            found = objects.by_name(call.tx, workspace=home, kind="secret", name=name)
            if found is None:
                found = call.create("secret", name, workspace=call.target)
                _add(call.tx, found.id, sealed=sealed, by=call.caller.id, now=call.now)
            else:
                self.gate.require(call, "secrets.remove", found)
                _replace(call.tx, found.id, sealed=sealed, by=call.caller.id, now=call.now)
            return secret_record(call.tx, found)

        return self.gate.commit(call, publish)

    @operation("secrets.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[Secret]:
        """The secrets of a workspace: their names, who set them and when; never a value."""
        return list_workspace_page(
            self.gate,
            "secret",
            lambda tx, page: [secret_record(tx, each) for each in page],
            after=after,
            limit=limit,
        )

    @operation("secrets.use", resource="secret", mode=Mode.READ, allow=Role.DEVELOPER, internal=True)
    def use(self, secret: SecretRef) -> Secret:
        """Ask whether your jobs may be given a secret. Each attempt of a job asks this; nobody is told the value."""
        return secret_record(current_call().tx, current_call().target)

    @operation("secrets.remove", resource="secret", confirm=True)
    def remove(self, secret: SecretRef) -> Secret:
        """Remove a secret with its value; jobs that refer to it do not start any more."""
        call = current_call()
        gone = secret_record(call.tx, call.target)
        call.tx.execute(delete(secrets).where(secrets.c.id == call.target.id))
        objects.delete(call.tx, call.target.id, at=call.now)
        return gone


def require_secrets(gate: Gate, call: Call, given: Mapping[str, str], *, workspace: StoredObject) -> None:
    """The caller may use every secret that `given` names by variable, seen from `workspace`; all faults at once."""
    faults, denied = [], False
    for variable, reference in given.items():
        try:
            found = _resolve(call.tx, reference, workspace=workspace)
            if not gate.authorizer.sees(call.tx, call.caller, found):
                raise objects.unknown(reference, "secret")
            gate.require(call, USE, found)
        except FalajError as error:
            denied = denied or isinstance(error, Denied)
            fix = None if isinstance(error, Denied) else f"falaj secrets set {_name(reference)}"
            faults.append(Fault(where=f"secrets.{variable}", given=reference, allowed=error.message, fix=fix))
    if faults:
        kind = Denied if denied else NotFound
        raise kind(f"{len(faults)} of the job's secrets cannot be used", faults=faults)


def open_secrets(service: Secrets, given: Mapping[str, str], *, workspace: ObjectId) -> dict[str, str]:
    """The values by variable, for whoever acts now: each is asked for as secrets.use, and the audit log says so.

    References are seen from `workspace`, that of the job. NotFound, Denied or KeyUnavailable where one cannot be had.
    """
    values: dict[str, str] = {}
    for variable, reference in given.items():
        with service.gate.database.read() as tx:
            home = objects.by_id(tx, workspace)
            if home is None:
                raise NotFound("the workspace of the job is gone")
            found = _resolve(tx, reference, workspace=home)
        service.use(found.id)
        values[variable] = _open(service, found)
    return values


def secret_record(tx: Transaction, found: StoredObject) -> Secret:
    row = _row(tx, found.id)
    return Secret(
        id=found.id,
        name=found.name,
        set_by=objects.name_of(tx, row["set_by"]),
        created_at=found.created_at,
        changed_at=row["changed_at"],
    )


def _resolve(tx: Transaction, reference: str, *, workspace: StoredObject) -> StoredObject:
    return objects.resolve(tx, reference, kind="secret", workspace=workspace.name)


def _open(service: Secrets, found: StoredObject) -> str:
    with service.gate.database.read() as tx:
        row = tx.execute(select(secrets.c.sealed).where(secrets.c.id == found.id)).first()
        is_erased = not has_living_key(tx, found.workspace)  # the keyring knows it a moment later
    if row is None:
        raise objects.unknown(found.name, "secret")
    if is_erased:
        raise KeyUnavailable(f"secret {found.name} was erased with the keys of its workspace")
    context = _context(found.workspace, found.name)
    return service._sealed.unseal(found.workspace, bytes(row.sealed), context=context).decode()


def _row(tx: Transaction, ident: str) -> Any:
    query = select(secrets.c.set_by, secrets.c.changed_at).where(secrets.c.id == ident)
    return tx.execute(query).mappings().one()


def _add(tx: Transaction, ident: str, *, sealed: bytes, by: str, now: datetime) -> None:
    row = {"id": ident, "sealed": sealed, "set_by": by, "changed_at": now}
    tx.execute(insert(secrets), row)


def _replace(tx: Transaction, ident: str, *, sealed: bytes, by: str, now: datetime) -> None:
    new = {"sealed": sealed, "set_by": by, "changed_at": now}
    tx.execute(update(secrets).where(secrets.c.id == ident).values(**new))


def _context(workspace: str, name: str) -> bytes:
    return f"{workspace}/{name}".encode()


def _name(reference: str) -> str:
    return reference.rpartition("/")[2].rpartition(":")[2]
