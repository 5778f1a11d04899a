"""Decisions over values: no database, no clock. An evaluation error is a denial."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cedarpy

from falaj.errors import Fault, PolicyInvalid
from falaj.governance.operations.operation import Operation
from falaj.governance.policy.roles import BUILT_IN, GOVERNING, role_entity, roles_allowed
from falaj.governance.policy.schema import cedar_schema, entity_type, groups_of
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.policy import Decision
from falaj.records.governance.residency import UNRESTRICTED
from falaj.records.names import ROOT

NO_RULE = "default"
"""The name of the rule that denies when no other applies."""


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
        self._operations = {op.name: op for op in operations}
        self._schema = cedarpy.Schema.from_json_str(json.dumps(cedar_schema(self._operations.values())))
        rules = [BUILT_IN, *(self.confined(policy) for policy in custom)]
        self._policies = cedarpy.PolicySet.from_str("\n".join(rules))
        self._actions = cedarpy.Entities.from_json_str(json.dumps(self._action_entities()))

    def confined(self, policy: PolicyText) -> str:
        """`policy` with ids of ours, conjoined with its workspace; PolicyInvalid if it does not fit the schema."""
        try:
            parsed = json.loads(cedarpy.policies_to_json_str(policy.text))
        except ValueError as error:
            raise PolicyInvalid.at(policy.name, given=policy.text.strip()[:80], allowed=str(error)) from None
        if parsed["templates"]:
            raise PolicyInvalid.at(
                policy.name, given="a template", allowed="static policies", fix="fill the slots in"
            )
        for number, static in enumerate(parsed["staticPolicies"].values()):
            own = static.setdefault("annotations", {}).get("id", str(number))
            static["annotations"]["id"] = f"{policy.name}#{own}"
            if policy.workspace is not None:  # the first condition: in another workspace no later one can err
                static["conditions"].insert(0, _in_workspace(policy.workspace))
                if static["effect"] == "forbid":
                    static["conditions"].insert(1, _not_governing())
        text = cedarpy.policies_from_json_str(json.dumps(parsed))
        self._validate(policy.name, text)
        return text

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
        subject: cedarpy.Entities | None = None,
    ) -> Decision:
        """Return the decision on `action` of `principal` on `resource`, which is in the workspace `home`."""
        operation = self._operations.get(action)
        if operation is None:
            return Decision(allowed=False, rule=NO_RULE, reason=f"there is no action {action!r}")
        request = {
            "principal": _uid(entity_type(principal.kind), principal.id),
            "action": _uid("Action", action),
            "resource": _uid(entity_type(resource.kind), resource.id),
            "context": {"origin": origin},
        }
        entities = (subject or self.subject(principal)).with_added_json_str(
            json.dumps(_resource_entities(resource, home, besides=principal.id))
        )
        answer = cedarpy.is_authorized(request, self._policies, entities)
        return _decision(answer, operation)

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
                for op in self._operations.values()
            ),
        ]

    def _validate(self, name: str, text: str) -> None:
        found = cedarpy.validate_policies(text, self._schema)
        if not found.validation_passed:
            faults = [Fault(where=name, allowed=error.error) for error in found.errors]
            raise PolicyInvalid(f"policy {name} does not fit the schema", faults=faults)


def _decision(answer: cedarpy.AuthzResult, operation: Operation) -> Decision:
    roles = roles_allowed(operation.allow)
    wanted = " or ".join(roles) or "another rule"
    names = answer.diagnostics.id_annotations_by_reason
    rules = ", ".join(sorted(names.get(r, r) for r in answer.diagnostics.reasons))
    if answer.diagnostics.errors:
        reason = f"a rule could not be evaluated: {'; '.join(answer.diagnostics.errors)}"
        return Decision(allowed=False, rule="evaluation-error", reason=reason, roles=roles)
    if answer.allowed:
        return Decision(allowed=True, rule=rules, reason=f"permitted by {rules}", roles=roles)
    if rules:
        return Decision(allowed=False, rule=rules, reason=f"forbidden by {rules}", roles=roles)
    reason = f"no rule permits {operation.name}; it takes the role {wanted}"
    return Decision(allowed=False, rule=NO_RULE, reason=reason, roles=roles)


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


def _in_workspace(workspace: str) -> dict[str, Any]:
    right = {"Value": _ref("Workspace", workspace)}
    return {"kind": "when", "body": {"in": {"left": {"Var": "resource"}, "right": right}}}


def _not_governing() -> dict[str, Any]:
    """A workspace's policy does not take the platform out of the hands of its administrators and auditors."""
    kept = [
        {"in": {"left": {"Var": "principal"}, "right": {"Value": _ref("Role", role_entity(ROOT, role))}}}
        for role in (Role.ADMIN, Role.AUDITOR)
    ]
    governing = {"in": {"left": {"Var": "action"}, "right": {"Value": _ref("Action", GOVERNING)}}}
    keeper = {"||": {"left": kept[0], "right": kept[1]}}
    return {"kind": "unless", "body": {"&&": {"left": governing, "right": keeper}}}


def _uid(kind: str, name: str) -> dict[str, str]:
    return {"type": kind, "id": name}


def _ref(kind: str, name: str) -> dict[str, Any]:
    return {"__entity": _uid(kind, name)}
