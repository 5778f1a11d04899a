"""Parse Cedar policies, check them against the schema, and confine them to their workspace: pure functions of text."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import cedarpy

from falaj.errors import Fault, PolicyInvalid
from falaj.governance.policy.roles import GOVERNING, role_entity
from falaj.governance.policy.text_bounds import require_bounded
from falaj.records.governance.identity import Role
from falaj.records.names import ROOT

Rules = dict[str, Any]
"""Static policies as Cedar's JSON, by the name of each rule."""

RULE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}")
"""What the annotation `id` of a rule may be; another is not used. Decisions name rules in errors and in the audit log,
divided by commas, and a policy must not pass off its rules as others."""
KEPT = 64
"""How many parsed policies stay in memory: policies in force are parsed again with each epoch."""


def confined_rules(name: str, text: str, workspace: str | None, schema: str) -> Rules:
    """Return the rules of a policy, confined to its workspace (none: everywhere). PolicyInvalid if it is not valid.

    In another workspace no condition of it is evaluated, and neither is one where an administrator or auditor of the
    platform governs: there it neither permits nor forbids, whatever it contains.
    """
    rules: Rules = {}
    for number, static in enumerate(valid_rules(name, text, schema).values()):
        own = static.setdefault("annotations", {}).get("id") or ""
        static["annotations"]["id"] = f"{name}#{own if RULE_ID.fullmatch(own) else number}"
        if workspace is not None:
            static["conditions"] = [_in_workspace(workspace), _not_governed(), *static["conditions"]]
        rules[f"{name}#{number}"] = static
    return rules


def valid_rules(name: str, text: str, schema: str) -> Rules:
    """Return the rules of a policy as they are written. PolicyInvalid if it is not valid."""
    try:
        rules: Rules = json.loads(_valid(text, schema))
    except PolicyInvalid as error:
        faults = [fault.model_copy(update={"where": name}) for fault in error.faults]
        raise PolicyInvalid(error.message.replace("policy", f"policy {name}", 1), faults=faults) from None
    return rules


@lru_cache(maxsize=KEPT)
def _valid(text: str, schema: str) -> str:
    """Return the rules of a valid text as JSON. Long sets take Cedar 0.1 ms for each element, so it is kept."""
    require_bounded("policy", text)
    try:
        parsed = json.loads(cedarpy.policies_to_json_str(text))
    except ValueError as error:
        fault = Fault(where="policy", given=text.strip()[:80], allowed=str(error))
        raise PolicyInvalid("policy is not valid", faults=[fault]) from None
    if parsed["templates"]:
        raise PolicyInvalid.at(
            "policy", given="a template", allowed="static policies", fix="fill the slots in"
        )
    _validate("policy", text, schema)
    return json.dumps(parsed["staticPolicies"])


def shut(name: str, workspace: str | None) -> Rules:
    """Return the rule that stands in for a stored policy that is not valid any more: it forbids all but governing."""
    rule = {
        "effect": "forbid",
        "principal": {"op": "All"},
        "action": {"op": "All"},
        "resource": {"op": "All"},
        "conditions": [_not_governed()],
        "annotations": {"id": f"{name}#unusable"},
    }
    if workspace is not None:
        rule["conditions"] = [_in_workspace(workspace), _not_governed()]
    return {f"{name}#unusable": rule}


def parsed_rules(text: str) -> Rules:
    """Return the rules of a policy of the platform's own."""
    rules: Rules = json.loads(cedarpy.policies_to_json_str(text))["staticPolicies"]
    return rules


def policy_set(rules: Rules) -> cedarpy.PolicySet:
    document = {"staticPolicies": rules, "templates": {}, "templateLinks": []}
    return cedarpy.PolicySet.from_json_str(json.dumps(document))


def _validate(name: str, text: str, schema: str) -> None:
    found = cedarpy.validate_policies(text, _schema(schema))
    if not found.validation_passed:
        faults = [Fault(where=name, allowed=error.error) for error in found.errors]
        raise PolicyInvalid("policy does not fit the schema", faults=faults)


@lru_cache(maxsize=2)
def _schema(text: str) -> cedarpy.Schema:
    return cedarpy.Schema.from_json_str(text)


def _in_workspace(workspace: str) -> dict[str, Any]:
    return {"kind": "when", "body": _is_in("resource", "Workspace", workspace)}


def _not_governed() -> dict[str, Any]:
    """The condition that keeps the platform in the hands of its administrators and auditors."""
    governors = [_is_in("principal", "Role", role_entity(ROOT, role)) for role in (Role.ADMIN, Role.AUDITOR)]
    governor = {"||": {"left": governors[0], "right": governors[1]}}
    governing = _is_in("action", "Action", GOVERNING)
    return {"kind": "unless", "body": {"&&": {"left": governing, "right": governor}}}


def _is_in(variable: str, kind: str, name: str) -> dict[str, Any]:
    entity = {"Value": {"__entity": {"type": kind, "id": name}}}
    return {"in": {"left": {"Var": variable}, "right": entity}}
