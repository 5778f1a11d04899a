"""An operation in progress: its caller, its transaction, the objects it refers to and those it makes."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from falaj.governance import objects
from falaj.governance.operations.caller import Caller, Terms
from falaj.governance.operations.operation import Operation
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.policy import Decision
from falaj.records.governance.residency import UNRESTRICTED, Label, union
from falaj.records.names import ObjectId, new_id


@dataclass
class Call:
    """The context of a running operation. Bodies get it by `current_call()`.

    `digest` is the HMAC of the input; `content` the digest of uploaded bytes, which the body sets when it knows it;
    `details` are further fields of the audit entry, `event_data` of the event; `announced` are further events;
    `policy` is what the authorizer read in the transaction it names.
    """

    operation: Operation
    caller: Caller
    given: BaseModel
    terms: Terms
    now: datetime
    resource: StoredObject | None = None
    decision: Decision | None = None
    referred: dict[str, list[StoredObject]] = field(default_factory=dict)
    created: list[StoredObject] = field(default_factory=list)
    zone: str | None = None
    hot_id: ObjectId | None = None
    epoch_moved: bool = False
    policy: tuple[Transaction, Any] | None = None
    recorded: bool = False
    digest: str | None = None
    content: str | None = None
    published: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    event_data: dict[str, Any] = field(default_factory=dict)
    announced: list[dict[str, Any]] = field(default_factory=list)
    _tx: Transaction | None = None

    @property
    def tx(self) -> Transaction:
        """The transaction of this operation; there is none before the commit point of a late one."""
        if self._tx is None:
            raise RuntimeError(f"{self.operation.name} has no transaction open here")
        return self._tx

    @property
    def target(self) -> StoredObject:
        """The object that the operation acts on."""
        if self.resource is None:
            raise RuntimeError(f"{self.operation.name} has not been admitted")
        return self.resource

    def object(self, parameter: str) -> StoredObject:
        """The object that `parameter` refers to."""
        return self.referred[parameter][0]

    def sources(self) -> list[StoredObject]:
        """The objects whose data flows into what this call makes."""
        everything = (found for group in self.referred.values() for found in group)
        return [found for found in everything if found.kind not in objects.PLATFORM_KINDS]

    def publish(self, kind: str, ref: str, *, version: int, digest: str) -> None:
        """Record that the call publishes bytes outside the database: which, and the digest of what they are.

        The rows of the database that the call changes are recorded by themselves.
        """
        self.published.append({"kind": kind, "ref": ref, "version": version, "digest": digest})

    def create(
        self,
        kind: str,
        name: str | None = None,
        *,
        workspace: StoredObject,
        zone: str | None = None,
        own: Label = UNRESTRICTED,
        ident: ObjectId | None = None,
        owner: str | None = None,
    ) -> StoredObject:
        """A new object, owned by the caller, under the restrictions of everything that flows into it."""
        ident = ident or new_id(kind)
        new = StoredObject(
            id=ident,
            workspace=workspace.id,
            kind=kind,
            name=name or ident,
            owner=owner or self.caller.id,  # type: ignore[arg-type]
            zone=zone,
            label=union([own, workspace.label, *(source.label for source in self.sources())]),
            own_label=own,
            created_at=self.now,
        )
        objects.create(self.tx, new)
        self.created.append(new)
        return new


_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar("falaj_call", default=None)


def current_call() -> Call:
    """Return the call whose body is running."""
    call = _call.get()
    if call is None:
        raise RuntimeError("no operation is running here")
    return call


def running_call() -> Call | None:
    return _call.get()


def enter(call: Call | None) -> contextvars.Token[Call | None]:
    return _call.set(call)


def leave(token: contextvars.Token[Call | None]) -> None:
    _call.reset(token)
