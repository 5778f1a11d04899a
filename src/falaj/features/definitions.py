"""Plan and apply definitions of entities and views. Every change of a view makes a new version."""

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
    """Return the change of each definition. Raise Conflict if an existing object does not allow it."""
    known = {entity.name: entity for entity in entities}
    _require_unique("entities", [entity.name for entity in entities])
    _require_unique("views", [view.name for view in views])
    return (
        *(_planned_entity(tx, workspace, entity) for entity in entities),
        *(_planned_view(tx, workspace, view, _keys(tx, workspace, view, known)) for view in views),
    )


def apply(
    call: Call, workspace: StoredObject, entities: Sequence[Entity], views: Sequence[FeatureView], zone: Zone
) -> ApplyResult:
    """Apply the plan to workspace `workspace`. An existing entity must not change, because views depend on it."""
    changes = plan(call.tx, workspace, entities, views)
    kinds = {(each.kind, each.name): each.change for each in changes}
    for entity in entities:
        if kinds["entity", entity.name] is ChangeKind.NEW:
            store.add_entity(call, call.create("entity", entity.name, workspace=workspace), entity)
    now = tuple(_applied(call, workspace, view, kinds["view", view.name], zone) for view in views)
    new = tuple(entity.name for entity in entities if kinds["entity", entity.name] is ChangeKind.NEW)
    return ApplyResult(entities=new, views=now, changes=changes)


def _planned_entity(tx: Transaction, workspace: StoredObject, given: Entity) -> PlannedChange:
    found = objects.by_name(tx, workspace=workspace.id, kind="entity", name=given.name)
    if found is not None and store.load_entity(tx, found) != given:
        raise Conflict(f"entity {given.name} exists with another key; use another name for the new one")
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
        raise Conflict(f"view {given.name}: a new version must keep the label; change it with objects.label")
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


def _applied(
    call: Call, workspace: StoredObject, given: FeatureView, change: ChangeKind, zone: Zone
) -> StoredView:
    """Store a new version of the view if it changed, and return its newest version."""
    keys = _keys(call.tx, workspace, given, {})
    found = objects.by_name(call.tx, workspace=workspace.id, kind="view", name=given.name)
    if found is None:
        if not given.own_label.permits(zone.jurisdiction):
            subject = f"view {given.name} ({given.own_label.describe()})"
            raise ResidencyDenied(f"{subject} may not lie in zone {zone.name} ({zone.jurisdiction})")
        found = call.create("view", given.name, workspace=workspace, zone=zone.name, own=given.own_label)
        store.add_view(call, found.id, 1, given, keys)
    elif change is ChangeKind.CHANGED:
        store.add_view(call, found.id, store.load_view(call.tx, found).version + 1, given, keys)
    return store.load_view(call.tx, found)


def _keys(
    tx: Transaction, workspace: StoredObject, given: FeatureView, known: dict[str, Entity]
) -> tuple[Feature, ...]:
    """Return the key columns of a view, from the entities given in the same call (`known`) or stored ones."""
    keys = []
    for name in given.entities:
        entity = known.get(name)
        if entity is None:
            entity = store.load_entity(tx, objects.resolve(tx, name, kind="entity", workspace=workspace.name))
        keys.append(Feature(name=entity.key, type=entity.type))
    taken = [each.name for each in (*given.columns, *given.features)] + [given.event_time, given.created_time]
    names = [key.name for key in keys]
    duplicates = [name for name in names if name in taken or names.count(name) > 1]
    if duplicates:
        raise InvalidInput.at(
            f"view {given.name}", given=", ".join(duplicates), allowed="key columns with unique names"
        )
    return tuple(keys)


def _require_unique(where: str, names: list[str]) -> None:
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        raise InvalidInput.at(where, given=", ".join(sorted(duplicates)), allowed="each name once")
