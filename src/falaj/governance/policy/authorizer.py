"""Decisions for callers, from the policies and grants in the database, cached until the epoch moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import select

from falaj.governance.objects import by_id
from falaj.governance.operations.call import running_call
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.operation import Operation
from falaj.governance.policy.engine import PolicyEngine, PolicyText, PrincipalFacts
from falaj.governance.policy.epochs import current_epoch
from falaj.governance.tables import grants, group_members, objects, policies
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.policy import Decision
from falaj.records.names import ROOT

CACHE_LIMIT = 100_000
SEE = "objects.show"
"""The action that decides whether a caller may know of an object."""


@dataclass
class _State:
    """The policies, grants and decisions of one epoch."""

    epoch: int
    engine: PolicyEngine
    has_custom: bool
    facts: dict[str, PrincipalFacts] = field(default_factory=dict)
    subjects: dict[str, Any] = field(default_factory=dict)
    decisions: dict[tuple[str, ...], Decision] = field(default_factory=dict)


class Authorizer:
    """Decides whether a caller may perform an action; its cache is never older than the transaction it is asked in."""

    def __init__(self, operations: Iterable[Operation], *, files: Sequence[PolicyText] = ()) -> None:
        self._operations = list(operations)
        self._personal = {op.name for op in self._operations if {"anyone", "owner"} & op.allow}
        self._files = tuple(files)
        PolicyEngine(self._operations, self._files)  # a file that cannot be used stops the start
        self._state: _State | None = None

    def decide(self, tx: Transaction, caller: Caller, action: str, resource: StoredObject) -> Decision:
        """Return the decision for `caller`, including the scope of its token."""
        outside = self._outside_scope(caller, action, resource)
        return outside or self._decide(self.state(tx), tx, caller, action, resource)

    def sees(self, tx: Transaction, caller: Caller, resource: StoredObject) -> bool:
        """Tell whether `caller` may know of `resource`; that depends on a token's workspace, not on its actions."""
        return self.decide(tx, replace(caller, actions=None), SEE, resource).allowed

    def state(self, tx: Transaction) -> _State:
        epoch = current_epoch(tx)
        if self._state is not None and self._state.epoch == epoch:
            return self._state
        custom = [*self._files, *published(tx)]
        state = _State(epoch, PolicyEngine(self._operations, custom), has_custom=bool(custom))
        call = running_call()
        if (
            call is None or not call.epoch_moved
        ):  # else it was read in a transaction that may yet be rolled back
            self._state = state
        return state

    def engine(self, tx: Transaction) -> PolicyEngine:
        return self.state(tx).engine

    def roles(self, tx: Transaction, principal: StoredObject) -> PrincipalFacts:
        """Return the facts that policies can use about a principal."""
        state = self.state(tx)
        known = state.facts.get(principal.id)
        if known is None:
            known = state.facts[principal.id] = principal_facts(tx, principal)
        return known

    def _decide(
        self, state: _State, tx: Transaction, caller: Caller, action: str, resource: StoredObject
    ) -> Decision:
        origin = caller.origin.partition(":")[0]
        key = (caller.id, action, resource.id, resource.name, origin)
        known = state.decisions.get(key)
        if known is not None:
            return known
        facts = state.facts.get(caller.id)
        if facts is None:
            facts = state.facts[caller.id] = facts_of(tx, caller.id, caller.name, caller.kind)
        subject = state.subjects.get(caller.id)
        if subject is None:
            subject = state.subjects[caller.id] = state.engine.subject(facts)
        home = resource if resource.kind == "workspace" else by_id(tx, resource.workspace)
        decision = state.engine.decide(facts, action, resource, home=home, origin=origin, subject=subject)
        if len(state.decisions) >= CACHE_LIMIT:
            state.decisions.clear()
        state.decisions[key] = decision
        return decision

    def _outside_scope(self, caller: Caller, action: str, resource: StoredObject) -> Decision | None:
        if not caller.may_name(action):
            return Decision(
                allowed=False,
                rule="token.actions",
                reason=f"this token is limited to {', '.join(caller.actions or ())}",
            )
        home = resource.home
        if caller.workspace in (None, home) or (home == ROOT and action in self._personal):
            return None
        return Decision(
            allowed=False, rule="token.workspace", reason="this token is limited to another workspace"
        )


def published(tx: Transaction) -> list[PolicyText]:
    """Return the policies in force, each confined to its workspace."""
    query = (
        select(objects.c.name, objects.c.workspace, policies.c.text, policies.c.version)
        .join(policies, policies.c.id == objects.c.id)
        .where(policies.c.withdrawn_at.is_(None), objects.c.deleted_at.is_(None))
        .order_by(objects.c.id)
    )
    return [
        PolicyText(f"policy:{name}@{version}", text, None if workspace == ROOT else workspace)
        for name, workspace, text, version in tx.execute(query)
    ]


def principal_facts(tx: Transaction, principal: StoredObject) -> PrincipalFacts:
    return facts_of(tx, principal.id, principal.name, principal.kind)


def facts_of(tx: Transaction, ident: str, name: str, kind: str) -> PrincipalFacts:
    groups = [
        row.group_id
        for row in tx.execute(
            select(group_members.c.group_id)
            .join(objects, objects.c.id == group_members.c.group_id)
            .where(group_members.c.member == ident, objects.c.deleted_at.is_(None))
        )
    ]
    held = tx.execute(select(grants.c.workspace, grants.c.role).where(grants.c.subject.in_([ident, *groups])))
    roles = tuple(sorted({(workspace, Role(role)) for workspace, role in held}))
    return PrincipalFacts(ident, name, kind, tuple(groups), roles)
