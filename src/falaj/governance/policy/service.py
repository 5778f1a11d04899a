"""Custom policies: published per workspace, checked against the schema, in force at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from sqlalchemy import func, insert, select, update

from falaj.errors import Conflict, InvalidInput
from falaj.governance import objects
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, Operation, operation
from falaj.governance.operations.pagination import list_workspace_page
from falaj.governance.policy.epochs import advance_epoch
from falaj.governance.policy.new_policies import count_rules, require_room
from falaj.governance.policy.schema import cedar_schema
from falaj.governance.tables import objects as objects_table
from falaj.governance.tables import policies, principals
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ParserPool
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.governance.policy import AllowedPrincipal, Policy
from falaj.records.names import ROOT, AnyRef, Name, PolicyRef, TextRule, WorkspaceRef
from falaj.records.record import Record

CedarText = Annotated[str, Field(min_length=1, max_length=200_000)]
ActionName = Annotated[
    str, TextRule(r"[a-z]+\.[a-z_]+", "an action is group.verb, like blobs.read", limit=96)
]


class CheckedPolicy(Record):
    """A policy text that parses and fits the schema."""

    rules: int


class PolicySchema(Record):
    """The Cedar schema that policies are checked against."""

    cedar: dict[str, Any]


class Policies:
    """Publish policies, and ask what the rules say."""

    def __init__(self, gate: Gate, operations: dict[str, Operation], parsers: ParserPool) -> None:
        self.gate = gate
        self._parsers = parsers
        self._operations = operations

    @operation("policies.publish", resource="workspace", mode=Mode.LATE, allow=Role.ADMIN)
    def publish(self, name: Name, *, text: CedarText, workspace: WorkspaceRef | None = None) -> Policy:
        """Put a policy in force in a workspace (`platform`: everywhere); an earlier version steps back."""
        call = current_call()
        confined_to = None if call.target.id == ROOT else str(call.target.id)
        self._count_rules(name, text, confined_to)
        require_room([text], self._schema())  # parses it here, before the transaction

        def put_in_force() -> Policy:
            known = objects.by_name(call.tx, workspace=call.target.id, kind="policy", name=name)
            found = known or call.create("policy", name, workspace=call.target)
            version = 1 + (call.tx.execute(_newest(found.id)).scalar() or 0)
            self._withdraw(found)
            in_force = _texts_in_force(call.tx, call.target.id)
            require_room([*in_force, text], self._schema())
            row = {"id": found.id, "version": version, "text": text, "published_at": call.now}
            call.tx.execute(insert(policies), row)
            if not self.gate.authorizer.decide(call.tx, call.caller, "policies.withdraw", found).allowed:
                raise Conflict(f"policy {name} would lock you out: you could not withdraw it again")
            return policy_record(call.tx, found)

        return self.gate.commit(call, put_in_force)

    @operation("policies.check", resource="platform", mode=Mode.FREE, allow="anyone")
    def check(self, *, text: CedarText) -> CheckedPolicy:
        """Say whether a policy could be published, without publishing it."""
        return CheckedPolicy(rules=self._count_rules("policy", text, None))

    @operation("policies.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[Policy]:
        """The policies of a workspace."""
        return list_workspace_page(
            self.gate,
            "policy",
            lambda tx, page: [policy_record(tx, each) for each in page],
            after=after,
            limit=limit,
        )

    @operation("policies.show", resource="policy", mode=Mode.READ)
    def show(self, policy: PolicyRef) -> Policy:
        """One policy, in its newest version."""
        return policy_record(current_call().tx, current_call().target)

    @operation("policies.withdraw", resource="policy", allow=Role.ADMIN)
    def withdraw(self, policy: PolicyRef) -> Policy:
        """Take a policy out of force. Undo: publish it again."""
        call = current_call()
        withdrawn = policy_record(call.tx, call.target)
        self._withdraw(call.target)
        objects.delete(call.tx, call.target.id, at=call.now)
        return withdrawn

    @operation("policies.who_can", resource="object", mode=Mode.READ, allow={Role.AUDITOR, Role.ADMIN})
    def who_can(self, action: ActionName, object: AnyRef) -> tuple[AllowedPrincipal, ...]:
        """List everyone who may perform an action on an object, and the rule that permits it."""
        call = current_call()
        if action not in self._operations:
            raise InvalidInput.at("action", given=action, allowed=", ".join(sorted(self._operations)))
        engine, home = self.gate.authorizer.engine(call.tx), objects.by_id(call.tx, call.target.home)
        answers = (
            (
                person,
                engine.decide(self.gate.authorizer.roles(call.tx, person), action, call.target, home=home),
            )
            for person in _everyone(call.tx)
        )
        return tuple(
            AllowedPrincipal(principal=person.name, kind=person.kind, rule=answer.rule)
            for person, answer in answers
            if answer.allowed
        )

    @operation("policies.allowed", resource="object", mode=Mode.READ, allow={Role.VIEWER, "owner"})
    def allowed(
        self, actions: Annotated[tuple[ActionName, ...], Field(min_length=1, max_length=100)], object: AnyRef
    ) -> tuple[str, ...]:
        """List those of `actions` that you may perform on an object now; interfaces offer no others."""
        call = current_call()
        known = [action for action in dict.fromkeys(actions) if action in self._operations]
        decide = self.gate.authorizer.decide
        return tuple(each for each in known if decide(call.tx, call.caller, each, call.target).allowed)

    @operation("policies.schema", resource="platform", mode=Mode.READ, allow="anyone")
    def schema(self) -> PolicySchema:
        """The Cedar schema of every action and kind of object, for editors and CI."""
        return PolicySchema(cedar=json.loads(self._schema()))

    def _count_rules(self, name: str, text: str, workspace: str | None) -> int:
        owner = current_call().caller.id
        return count_rules(name, text, workspace, self._schema(), self._parsers, owner=owner)

    def _schema(self) -> str:
        return json.dumps(cedar_schema(self._operations.values()))

    def _withdraw(self, found: StoredObject) -> None:
        call = current_call()
        in_force = policies.c.id == found.id, policies.c.withdrawn_at.is_(None)
        call.tx.execute(update(policies).where(*in_force).values(withdrawn_at=call.now))
        advance_epoch(call.tx)


def policy_record(tx: Transaction, found: StoredObject) -> Policy:
    newest = select(policies).where(policies.c.id == found.id).order_by(policies.c.version.desc()).limit(1)
    row = tx.execute(newest).mappings().one()
    home = objects.by_id(tx, found.workspace)
    return Policy(
        id=found.id,
        workspace=home.name if home else found.workspace,
        name=found.name,
        version=row["version"],
        text=row["text"],
        published_at=row["published_at"],
    )


def _texts_in_force(tx: Transaction, workspace: str) -> Sequence[str]:
    query = (
        select(policies.c.text)
        .join(objects_table, objects_table.c.id == policies.c.id)
        .where(objects_table.c.workspace == workspace, objects_table.c.deleted_at.is_(None))
        .where(policies.c.withdrawn_at.is_(None))
    )
    return tx.execute(query).scalars().all()


def _newest(ident: str) -> Any:
    return select(func.max(policies.c.version)).where(policies.c.id == ident)


def _everyone(tx: Transaction) -> tuple[StoredObject, ...]:
    """Return every principal that is not disabled."""
    query = (
        select(objects_table)
        .join(principals, principals.c.id == objects_table.c.id)
        .where(principals.c.disabled_at.is_(None))
        .order_by(objects_table.c.name)
    )
    return tuple(objects.stored_object(row) for row in tx.execute(query).mappings())
