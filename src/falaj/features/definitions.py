"""Definitions: what applying them would change, and bringing that about. Every change of a view is a new version."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.errors import Conflict, InvalidInput, ResidencyDenied
from falaj.features import store
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.ports.metadata import Transaction
from falaj.records.features import (
    ApplyResult,
    ChangeKind,
    Entity,
    Feature,
    FeatureView,
    PlannedChange,
    StoredView,
)
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import Zone


def plan(
    tx: Transaction, workspace: StoredObject, entities: Sequence[Entity], views: Sequence[FeatureView]
) -> tuple[PlannedChange, ...]:
    """What would become of each definition. Conflict where one that is there does not allow it."""
    known = {entity.name: entity for entity in entities}
    _require_once("entities", [entity.name for entity in entities])
    _require_once("views", [view.name for view in views])
    return (
        *(_planned_entity(tx, workspace, entity) for entity in entities),
        *(_planned_view(tx, workspace, view, _keys(tx, workspace, view, known)) for view in views),
    )


def apply(call: Call, entities: Sequence[Entity], views: Sequence[FeatureView], zone: Zone) -> ApplyResult:
    """Bring about what the plan says. An entity that is there may not change: views were built on it."""
    changes = plan(call.tx, call.target, entities, views)
    kinds = {(each.kind, each.name): each.change for each in changes}
    for entity in entities:
        if kinds["entity", entity.name] is ChangeKind.NEW:
            store.add_entity(call, call.create("entity", entity.name, workspace=call.target), entity)
    now = tuple(_applied(call, view, kinds["view", view.name], zone) for view in views)
    new = tuple(entity.name for entity in entities if kinds["entity", entity.name] is ChangeKind.NEW)
    return ApplyResult(entities=new, views=now, changes=changes)


def _planned_entity(tx: Transaction, workspace: StoredObject, given: Entity) -> PlannedChange:
    found = objects.by_name(tx, workspace=workspace.id, kind="entity", name=given.name)
    if found is not None and store.load_entity(tx, found) != given:
        raise Conflict(f"entity {given.name} is there with another key; give the new one another name")
    return PlannedChange(
        kind="entity", name=given.name, change=ChangeKind.NEW if found is None else ChangeKind.UNCHANGED
    )


def _planned_view(
    tx: Transaction, workspace: StoredObject, given: FeatureView, keys: tuple[Feature, ...]
) -> PlannedChange:
    found = objects.by_name(tx, workspace=workspace.id, kind="view", name=given.name)
    before = None if found is None else store.find_view(tx, found)
    if before is None:
        return PlannedChange(kind="view", name=given.name, change=ChangeKind.NEW, version=1)
    if before.definition.own_label != given.own_label:
        raise Conflict(f"view {given.name}: a new version keeps its label; objects.label changes it")
    differences = _differences(before, given, keys)
    return PlannedChange(
        kind="view",
        name=given.name,
        change=ChangeKind.CHANGED if differences else ChangeKind.UNCHANGED,
        version=before.version + bool(differences),
        differences=differences,
    )


def _differences(before: StoredView, given: FeatureView, keys: tuple[Feature, ...]) -> tuple[str, ...]:
    old = before.definition
    fields = [name for name in type(given).model_fields if getattr(old, name) != getattr(given, name)]
    return tuple(fields) + (("keys",) if before.keys != keys else ())


def _applied(call: Call, given: FeatureView, change: ChangeKind, zone: Zone) -> StoredView:
    """The view as it is now: the same version if nothing changed, else a new one."""
    keys = _keys(call.tx, call.target, given, {})
    found = objects.by_name(call.tx, workspace=call.target.id, kind="view", name=given.name)
    if found is None:
        if not given.own_label.permits(zone.jurisdiction):
            words = f"view {given.name} ({given.own_label.describe()}) may not lie in zone {zone.name}"
            raise ResidencyDenied(f"{words} ({zone.jurisdiction})")
        found = call.create("view", given.name, workspace=call.target, zone=zone.name, own=given.own_label)
        store.add_view(call, found.id, 1, given, keys)
    elif change is ChangeKind.CHANGED:
        store.add_view(call, found.id, store.load_view(call.tx, found).version + 1, given, keys)
    return store.load_view(call.tx, found)


def _keys(
    tx: Transaction, workspace: StoredObject, given: FeatureView, known: dict[str, Entity]
) -> tuple[Feature, ...]:
    """The key columns of a view: of entities that are `known` from beside it, or that are there."""
    keys = []
    for name in given.entities:
        entity = known.get(name)
        if entity is None:
            entity = store.load_entity(tx, objects.resolve(tx, name, kind="entity", workspace=workspace.name))
        keys.append(Feature(name=entity.key, type=entity.type))
    taken = [each.name for each in (*given.columns, *given.features)] + [given.event_time, given.created_time]
    names = [key.name for key in keys]
    twice = [name for name in names if name in taken or names.count(name) > 1]
    if twice:
        raise InvalidInput.at(f"view {given.name}", given=", ".join(twice), allowed="key columns named once")
    return tuple(keys)


def _require_once(where: str, names: list[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InvalidInput.at(where, given=", ".join(sorted(twice)), allowed="each name once")
