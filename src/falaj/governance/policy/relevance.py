"""Which attributes of a resource rules can look at: objects that agree in these get the same decision.

The decision itself is always Cedar's. Here is only told when one decision holds for many objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject

IDENTITY = "id"
"""Read by a rule that can tell an object from every other one."""
OWN = "own"
"""Read by a rule that asks whether the principal owns the object, not who else does."""

_GIVEN = frozenset({"workspace", *Role})
"""Attributes that kind and workspace of an object decide."""
_RESOURCE = {"Var": "resource"}
_OWNERS = [
    {".": {"left": {"Var": variable}, "attr": "owner"}}
    for variable in ("resource", "principal")  # a principal owns itself
]
_VALUES: Mapping[str, Callable[[StoredObject, str], Any]] = {
    IDENTITY: lambda found, _: found.id,
    OWN: lambda found, principal: found.owner == principal,
    "name": lambda found, _: found.name,
    "owner": lambda found, _: found.owner,
    "zone": lambda found, _: found.zone,
    "classes": lambda found, _: found.label.classes,
    "jurisdictions": lambda found, _: found.label.only,
}


def may_apply(rule: Mapping[str, Any], action: str, groups: Iterable[str]) -> bool:
    """Tell whether the scope of `rule` has `action`, which is in these groups: if not, nothing of it is evaluated."""
    scope = rule["action"]
    if scope["op"] == "All":
        return True
    named = {each["id"] for each in scope.get("entities") or [scope["entity"]]}
    return action in named or (scope["op"] == "in" and not named.isdisjoint(groups))


def attributes_read(rule: Mapping[str, Any]) -> frozenset[str]:
    """Return the attributes of the resource that `rule` can look at, besides its kind and its workspace."""
    found = {*_of_scope(rule["resource"])}
    for condition in rule["conditions"]:
        found |= {*_of_expression(condition["body"])}
    return frozenset(each if each in _VALUES else IDENTITY for each in found - _GIVEN)


def profile(found: StoredObject, principal: str, reads: Iterable[str]) -> tuple[Any, ...]:
    """Return what a decision about `found` depends on if the rules read these attributes."""
    return (
        found.kind,
        found.home,
        found.id == principal,  # the principal itself has its roles and groups
        *[_VALUES[each](found, principal) for each in reads],
    )


def _of_scope(scope: Mapping[str, Any]) -> Iterator[str]:
    within = scope.get("in", scope)
    for entity in [*within.get("entities", ()), *([within["entity"]] if "entity" in within else ())]:
        if entity["type"] != "Workspace":
            yield IDENTITY


def _of_expression(part: Any) -> Iterator[str]:
    """Yield the attributes of `resource` that an expression of Cedar's JSON reads; its identity for any other use."""
    if part == _RESOURCE:
        yield IDENTITY
    elif isinstance(part, list):
        for each in part:
            yield from _of_expression(each)
    elif isinstance(part, dict):
        for operator, inner in part.items():
            yield from _of_operator(operator, inner)


def _of_operator(operator: str, inner: Any) -> Iterator[str]:
    if operator == "Value" or _asks_for_workspace(operator, inner):
        return
    if operator in (".", "has") and inner["left"] == _RESOURCE:
        yield inner["attr"]
    elif operator == "==" and inner["left"] != inner["right"] and _are_owners(inner):
        yield OWN
    else:  # a record's keys, and the names of operands, are no operators
        yield from _of_expression([*inner.values()] if isinstance(inner, dict) else inner)


def _are_owners(sides: Mapping[str, Any]) -> bool:
    return sides["left"] in _OWNERS and sides["right"] in _OWNERS


def _asks_for_workspace(operator: str, inner: Any) -> bool:
    """Tell whether the expression is `resource in Workspace::…` or `resource is Kind`."""
    if operator == "in" and inner["left"] == _RESOURCE:
        entity = inner["right"].get("Value") if isinstance(inner["right"], dict) else None
        return isinstance(entity, dict) and entity.get("__entity", {}).get("type") == "Workspace"
    return operator == "is" and inner["left"] == _RESOURCE and "in" not in inner
