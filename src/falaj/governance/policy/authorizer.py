"""Decisions for callers, from the policies and grants in the database, cached until the epoch moves."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import select

from falaj.governance.objects import by_id
from falaj.governance.operations.call import running_call
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.operation import Operation
from falaj.governance.policy.engine import EVALUATION_ERROR, NO_RULE, PolicyEngine, PolicyText, PrincipalFacts
from falaj.governance.policy.epochs import current_epoch
from falaj.governance.policy.implied_actions import Context, ImpliedAction
from falaj.governance.tables import grants, group_members, objects, policies
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.policy import Decision
from falaj.records.names import ROOT

log = logging.getLogger("falaj.policy")

CACHE_LIMIT = 100_000
SEE = "objects.show"
"""The action that decides whether a caller may know of an object."""
UNPERMITTED = Decision(allowed=False, rule=NO_RULE, reason="it takes a policy that permits it")
UNOPPOSED = Decision(allowed=True, rule="anyone", reason="there are no policies but the roles")


@dataclass
class PolicyState:
    """The policies, grants and decisions of one epoch, and what queries leave out for callers (see `visibility`)."""

    epoch: int
    engine: PolicyEngine
    has_custom: bool
    facts: dict[str, PrincipalFacts] = field(default_factory=dict)
    subjects: dict[str, Any] = field(default_factory=dict)
    decisions: dict[tuple[Any, ...], Decision] = field(default_factory=dict)
    hidden: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = field(default_factory=dict)


class Authorizer:
    """Decides whether a caller may perform an action; its cache is never older than the transaction it is asked in."""

    def __init__(self, operations: Iterable[Operation], *, files: Sequence[PolicyText] = ()) -> None:
        self._operations = list(operations)
        self._personal = {op.name for op in self._operations if {"anyone", "owner"} & op.allow}
        self._files = tuple(files)
        engine = PolicyEngine(self._operations)
        for policy in self._files:  # a file that cannot be used stops the start
            engine.confined(policy)
        self._state: PolicyState | None = None

    def decide(self, tx: Transaction, caller: Caller, action: str, resource: StoredObject) -> Decision:
        """Return the decision for `caller`, including the scope of its token."""
        return self.decide_in(self.state(tx), tx, caller, action, resource)

    def decide_in(
        self, state: PolicyState, tx: Transaction, caller: Caller, action: str, resource: StoredObject
    ) -> Decision:
        """Return the decision by the policies of `state`, which was read in `tx`: for many decisions at once."""
        outside = self._outside_scope(caller, action, resource)
        return outside or self._decide(state, tx, caller, action, resource)

    def decide_implied(
        self, tx: Transaction, caller: Caller, action: ImpliedAction, resource: StoredObject, context: Context
    ) -> Decision:
        """Return the decision on an action that the running operation implies; a token's scope covers it with that."""
        state = self.state(tx)
        if not state.has_custom:
            return UNOPPOSED if action.allow else UNPERMITTED
        return self._decide(state, tx, caller, action.name, resource, context)

    def sees(self, tx: Transaction, caller: Caller, resource: StoredObject) -> bool:
        """Tell whether `caller` may know of `resource`; that depends on a token's workspace, not on its actions."""
        return self.decide(tx, replace(caller, actions=None), SEE, resource).allowed

    def state(self, tx: Transaction) -> PolicyState:
        """Return the policies in force; a call reads the epoch once in each of its transactions."""
        call = running_call()
        if call is None or call.epoch_moved:  # what it changes next has to show, too
            return self._state_now(tx)
        if call.policy is None or call.policy[0] is not tx:
            call.policy = tx, self._state_now(tx)
        state: PolicyState = call.policy[1]
        return state

    def _state_now(self, tx: Transaction) -> PolicyState:
        epoch = current_epoch(tx)
        if self._state is not None and self._state.epoch == epoch:
            return self._state
        custom = [*self._files, *published(tx)]
        state = PolicyState(epoch, PolicyEngine(self._operations, custom), has_custom=bool(custom))
        for name, error in state.engine.unusable.items():
            log.error(
                "policy is not valid any more: it closes its workspace",
                extra={"policy": name, "why": str(error)},
            )
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
        self,
        state: PolicyState,
        tx: Transaction,
        caller: Caller,
        action: str,
        resource: StoredObject,
        context: Context | None = None,
    ) -> Decision:
        origin = caller.origin.partition(":")[0]
        further = () if context is None else tuple(sorted(context.items()))
        key = (caller.id, action, origin, further, *state.engine.profile(caller.id, action, resource))
        known = state.decisions.get(key)
        if known is not None and known.rule != EVALUATION_ERROR:
            return known
        facts = state.facts.get(caller.id)
        if facts is None:
            facts = state.facts[caller.id] = facts_of(tx, caller.id, caller.name, caller.kind)
        subject = state.subjects.get(caller.id)
        if subject is None:
            subject = state.subjects[caller.id] = state.engine.subject(facts)
        home = resource if resource.kind == "workspace" else by_id(tx, resource.workspace)
        decision = state.engine.decide(
            facts, action, resource, home=home, origin=origin, context=context, subject=subject
        )
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
