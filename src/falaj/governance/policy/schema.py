"""The Cedar schema, generated from the operations: a policy that names anything else is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from falaj.governance.operations.operation import Operation
from falaj.governance.policy.implied_actions import IMPLIED, Context, ContextValue, ImpliedAction
from falaj.governance.policy.roles import GOVERNING, action_groups, is_governing
from falaj.records.governance.identity import Role

PRINCIPALS = ["User", "Service"]


def entity_type(kind: str) -> str:
    """The Cedar type of an object kind: `training_set` is `TrainingSet`."""
    return "".join(part.title() for part in kind.split("_"))


def kinds_of(operations: Iterable[Operation | ImpliedAction]) -> list[str]:
    """Return every kind of object that an operation acts on or refers to."""
    kinds = {"workspace", "user", "service", "group"}
    for op in operations:
        kinds |= {op.resource} | {ref.kind for ref in op.references.values() if ref.kind}
    return sorted(kinds - {"platform", "object", "subject"})


def cedar_schema(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the schema as Cedar's JSON."""
    operations = list(operations)
    kinds = kinds_of(operations)
    types: dict[str, Any] = {entity_type(kind): _object_type() for kind in kinds}
    types["Role"] = {"memberOfTypes": []}
    types["Workspace"]["shape"]["attributes"] |= {role: _entity("Role") for role in Role}
    types["Group"]["memberOfTypes"] = ["Role", "Workspace"]
    for principal in PRINCIPALS:
        types[principal]["memberOfTypes"] = ["Role", "Group", "Workspace"]
    groups: dict[str, Any] = {group: {} for group in [*Role, "anyone", "owner", GOVERNING]}
    every: list[Operation | ImpliedAction] = [*operations, *IMPLIED.values()]
    actions = {op.name: _action(op, kinds) for op in every}
    return {"": {"entityTypes": types, "actions": groups | actions}}


def resource_kinds(op: Operation | ImpliedAction, kinds: list[str]) -> list[str]:
    """The kinds that may stand as the resource of `op`."""
    if op.resource == "platform":
        return ["workspace"]
    if op.resource == "user":
        return ["service", "user"]
    return kinds if op.resource == "object" else [op.resource]


def groups_of(op: Operation | ImpliedAction) -> list[str]:
    """The action groups that an operation belongs to."""
    return [*action_groups(op.allow), *([GOVERNING] if is_governing(op.name) else [])]


def _action(op: Operation | ImpliedAction, kinds: list[str]) -> dict[str, Any]:
    further: Context = op.context if isinstance(op, ImpliedAction) else {}
    attributes = {"origin": _string()} | {name: _type_of(value) for name, value in further.items()}
    return {
        "memberOf": [{"id": group} for group in groups_of(op)],
        "appliesTo": {
            "principalTypes": PRINCIPALS,
            "resourceTypes": [entity_type(kind) for kind in resource_kinds(op, kinds)],
            "context": {"type": "Record", "attributes": attributes},
        },
    }


def _object_type() -> dict[str, Any]:
    attributes = {
        "workspace": _entity("Workspace"),
        "name": _string(),
        "owner": _string(),
        "zone": _string(required=False),
        "jurisdictions": {"type": "Set", "element": {"type": "String"}, "required": False},
        "classes": {"type": "Set", "element": {"type": "String"}},
    }
    return {"memberOfTypes": ["Workspace"], "shape": {"type": "Record", "attributes": attributes}}


def _type_of(value: ContextValue) -> dict[str, Any]:
    """Return the Cedar type of an attribute with the default `value`."""
    if isinstance(value, tuple):
        return {"type": "Set", "element": {"type": "String"}}
    return {"type": "Boolean"} if isinstance(value, bool) else _string()


def _entity(name: str) -> dict[str, Any]:
    return {"type": "Entity", "name": name}


def _string(*, required: bool = True) -> dict[str, Any]:
    return {"type": "String", "required": required}
