"""Decisions over values: no database, no clock.

A rule whose evaluation errs fails closed, and alone: a `permit` that errs does not permit, a `forbid` that errs
forbids. Neither has an effect on what other rules say, nor on other requests. A workspace's policies, erring or not,
have no effect on the governing actions of the platform's administrators and auditors (see `parsing`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cedarpy

from falaj.errors import PolicyInvalid
from falaj.governance.operations.operation import Operation
from falaj.governance.policy.implied_actions import IMPLIED, Context, ImpliedAction
from falaj.governance.policy.parsing import Rules, confined_rules, parsed_rules, policy_set, shut
from falaj.governance.policy.relevance import attributes_read, may_apply, profile
from falaj.governance.policy.roles import BUILT_IN, GOVERNING, role_entity, roles_allowed
from falaj.governance.policy.schema import cedar_schema, entity_type, groups_of, kinds_of
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.policy import Decision
from falaj.records.governance.residency import UNRESTRICTED
from falaj.records.names import ROOT

NO_RULE = "default"
"""The name of the rule that denies when no other applies."""
EVALUATION_ERROR = "evaluation-error"
"""The name of the rule that denies where a forbid errs. Its reason names the object, and is no other object's."""


@dataclass(frozen=True)
class PolicyText:
    """A custom policy: its name for people, its Cedar text, and the workspace it is confined to (none: everywhere)."""

    name: str
    text: str
    workspace: str | None = None


@dataclass(frozen=True)
class PrincipalFacts:
    """What policies can use of a principal: group ids, and (workspace id, role) pairs of it and its groups."""

    id: str
    name: str
    kind: str
    groups: tuple[str, ...] = ()
    roles: tuple[tuple[str, Role], ...] = ()


class PolicyEngine:
    """The built-in roles and custom policies, parsed once."""

    def __init__(self, operations: Iterable[Operation], custom: Sequence[PolicyText] = ()) -> None:
        known = list(operations)
        self._known: dict[str, Operation | ImpliedAction] = {op.name: op for op in known} | dict(IMPLIED)
        self.schema = json.dumps(cedar_schema(known))
        self.kinds = frozenset(kinds_of(known))
        self.unusable: dict[str, PolicyInvalid] = {}
        rules = parsed_rules(BUILT_IN)
        self._scopes: list[tuple[str | None, Any]] = [(None, rule) for rule in rules.values()]
        self._reads: dict[tuple[str, str], tuple[str, ...]] = {}
        for (
            policy
        ) in custom:  # policies of two workspaces may have one name: the position makes their rules' unique
            added = self._usable(policy)
            rules |= {f"{len(rules)}:{name}": rule for name, rule in added.items()}
            self._scopes += [(policy.workspace, rule) for rule in added.values()]
        self._policies = policy_set(rules)
        self._forbids = policy_set({name: rule for name, rule in rules.items() if rule["effect"] == "forbid"})
        self._actions = cedarpy.Entities.from_json_str(json.dumps(self._action_entities()))

    def reads(self, action: str, home: str) -> tuple[str, ...]:
        """Return the attributes of an object in the workspace `home` that a decision on `action` can depend on."""
        known = self._reads.get((action, home))
        if known is None:
            op = self._known.get(action)
            groups = () if op is None else groups_of(op)
            found = (
                attributes_read(rule)
                for workspace, rule in self._scopes
                if workspace in (None, home) and may_apply(rule, action, groups)
            )
            known = self._reads[action, home] = tuple(sorted(frozenset().union(*found)))
        return known

    def profile(self, principal: str, action: str, resource: StoredObject) -> tuple[Any, ...]:
        """Return what the decision depends on, of all that is known of `resource`."""
        return profile(resource, principal, self.reads(action, resource.home))

    def confined(self, policy: PolicyText) -> Rules:
        """Return the rules of `policy`; PolicyInvalid if it does not parse or fit the schema."""
        return confined_rules(policy.name, policy.text, policy.workspace, self.schema)

    def _usable(self, policy: PolicyText) -> Rules:
        """Return the rules of a policy in force; one that is not valid any more closes its workspace alone."""
        try:
            return self.confined(policy)
        except PolicyInvalid as error:
            self.unusable[policy.name] = error
            return shut(policy.name, policy.workspace)

    def subject(self, principal: PrincipalFacts) -> cedarpy.Entities:
        """The principal as parsed entities, for reuse over many decisions."""
        roles = [_uid("Role", role_entity(workspace, role)) for workspace, role in principal.roles]
        groups = [_uid("Group", group) for group in principal.groups]
        attributes = {
            "workspace": _ref("Workspace", ROOT),
            "name": principal.name,
            "owner": principal.id,
            "classes": [],
        }
        entity = {
            "uid": _uid(entity_type(principal.kind), principal.id),
            "attrs": attributes,
            "parents": [*roles, *groups, _uid("Workspace", ROOT)],
        }
        return self._actions.with_added_json_str(json.dumps([entity]))

    def decide(
        self,
        principal: PrincipalFacts,
        action: str,
        resource: StoredObject,
        *,
        home: StoredObject | None = None,
        origin: str = "local",
        context: Context | None = None,
        subject: cedarpy.Entities | None = None,
    ) -> Decision:
        """Return the decision on `action` of `principal` on `resource`, which is in the workspace `home`.

        An implied action takes a `context`; what it leaves out has its default.
        """
        asked = self._known.get(action)
        if asked is None:
            return Decision(allowed=False, rule=NO_RULE, reason=f"there is no action {action!r}")
        request = {
            "principal": _uid(entity_type(principal.kind), principal.id),
            "action": _uid("Action", action),
            "resource": _uid(entity_type(resource.kind), resource.id),
            "context": {"origin": origin} | _context(asked, context or {}),
        }
        entities = (subject or self.subject(principal)).with_added_json_str(
            json.dumps(_resource_entities(resource, home, besides=principal.id))
        )
        answer = cedarpy.is_authorized(request, self._policies, entities)
        errors: list[str] = []
        if answer.diagnostics.errors:  # of a permit that does not permit, or of a forbid
            errors = cedarpy.is_authorized(request, self._forbids, entities).diagnostics.errors
        decision = _decision(answer, asked, forbids_that_err=errors)
        broken = [error.message for name, error in self.unusable.items() if f"{name}#" in decision.rule]
        if decision.allowed or not broken:
            return decision
        return decision.model_copy(update={"reason": f"{decision.reason}: {'; '.join(broken)}; withdraw it"})

    def _action_entities(self) -> list[dict[str, Any]]:
        groups = [*(str(role) for role in Role), "anyone", "owner", GOVERNING]
        return [
            *({"uid": _uid("Action", group), "attrs": {}, "parents": []} for group in groups),
            *(
                {
                    "uid": _uid("Action", op.name),
                    "attrs": {},
                    "parents": [_uid("Action", group) for group in groups_of(op)],
                }
                for op in self._known.values()
            ),
        ]


def _decision(
    answer: cedarpy.AuthzResult, operation: Operation | ImpliedAction, *, forbids_that_err: Sequence[str]
) -> Decision:
    roles = roles_allowed(operation.allow)
    wanted = " or ".join(roles) or "another rule"
    names = answer.diagnostics.id_annotations_by_reason
    rules = ", ".join(sorted(names.get(r, r) for r in answer.diagnostics.reasons))
    if forbids_that_err:
        reason = f"a forbid could not be evaluated, so it forbids: {'; '.join(forbids_that_err)}"
        return Decision(allowed=False, rule=EVALUATION_ERROR, reason=reason, roles=roles)
    if answer.allowed:
        return Decision(allowed=True, rule=rules, reason=f"permitted by {rules}", roles=roles)
    if rules:
        return Decision(allowed=False, rule=rules, reason=f"forbidden by {rules}", roles=roles)
    reason = f"no rule permits {operation.name}; it takes the role {wanted}"
    return Decision(allowed=False, rule=NO_RULE, reason=reason, roles=roles)


def _context(asked: Operation | ImpliedAction, given: Context) -> dict[str, Any]:
    """Return the attributes of an implied action as Cedar's JSON."""
    attributes = {**asked.context, **given} if isinstance(asked, ImpliedAction) else given
    return {name: list(value) if isinstance(value, tuple) else value for name, value in attributes.items()}


def _resource_entities(
    resource: StoredObject, home: StoredObject | None, *, besides: str
) -> list[dict[str, Any]]:
    """The resource and its workspace; the principal, where it is the resource itself, is there already."""
    roles = {str(role): _ref("Role", role_entity(resource.home, role)) for role in Role}
    container = {
        "uid": _uid("Workspace", resource.home),
        "attrs": _attributes(home or _nameless(resource)) | roles,
        "parents": [] if resource.home == ROOT else [_uid("Workspace", ROOT)],
    }
    if resource.kind == "workspace":
        return [container | {"attrs": _attributes(resource) | roles}]
    if resource.id == besides:
        return [container]
    entity = {
        "uid": _uid(entity_type(resource.kind), resource.id),
        "attrs": _attributes(resource),
        "parents": [_uid("Workspace", resource.home)],
    }
    return [container, entity]


def _nameless(resource: StoredObject) -> StoredObject:
    """A workspace of which nothing is known but its id: an example decision may leave it out."""
    unknown = {"id": resource.home, "kind": "workspace", "name": resource.home, "owner": "", "zone": None}
    return resource.model_copy(update=unknown | {"label": UNRESTRICTED})


def _attributes(resource: StoredObject) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "workspace": _ref("Workspace", resource.home),
        "name": resource.name,
        "owner": resource.owner,
        "classes": sorted(resource.label.classes),
    }
    if resource.zone is not None:
        attributes["zone"] = resource.zone
    if resource.label.only is not None:
        attributes["jurisdictions"] = sorted(resource.label.only)
    return attributes


def _uid(kind: str, name: str) -> dict[str, str]:
    return {"type": kind, "id": name}


def _ref(kind: str, name: str) -> dict[str, Any]:
    return {"__entity": _uid(kind, name)}
