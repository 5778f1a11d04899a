"""Definitions of entities and views: what applying them would change, and those that fit the columns of a file.

Every change of a view makes a new version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from falaj.errors import Conflict, InvalidInput
from falaj.features import store
from falaj.features.joins import require_distinct_columns
from falaj.features.view_versions.kept_rows import rows_that_fit
from falaj.governance import objects
from falaj.governance.operations.operation import invalid
from falaj.ports.metadata import Transaction
from falaj.records.features import (
    ChangeKind,
    Column,
    ColumnType,
    Entity,
    Feature,
    FeatureView,
    InferredFeatures,
    KeepRows,
    KnownAt,
    PlannedChange,
    StoredView,
)
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import Label
from falaj.records.names import Name

CREATED = ("created_time", "created_at")
KEY_TYPES = (ColumnType.INTEGER, ColumnType.TEXT)
_KEY = re.compile(r"(?:^|_)(?:id|key|uuid)$", re.IGNORECASE)
_name, _column = TypeAdapter(Name), TypeAdapter(Column)


FindNamed = Callable[[str, str], StoredObject | None]
"""Returns the object of a kind and name; raises NotFound if the caller may not see it."""


@dataclass(frozen=True)
class GivenDefinitions:
    """Entities and views to apply, and which rows of views new versions take over."""

    entities: Sequence[Entity]
    views: Sequence[FeatureView]
    keep: KeepRows


def plan(
    tx: Transaction, workspace: StoredObject, given: GivenDefinitions, find: FindNamed
) -> tuple[PlannedChange, ...]:
    """Return the change of each definition. Raise Conflict if an existing object does not allow it."""
    known = {entity.name: entity for entity in given.entities}
    _require_unique("entities", [entity.name for entity in given.entities])
    _require_unique("views", [view.name for view in given.views])
    return (
        *(_planned_entity(tx, find("entity", entity.name), entity) for entity in given.entities),
        *(
            _planned_view(tx, find("view", view.name), view, keys_of(tx, workspace, view, known), given.keep)
            for view in given.views
        ),
    )


def _planned_entity(tx: Transaction, found: StoredObject | None, given: Entity) -> PlannedChange:
    if found is not None and store.load_entity(tx, found) != given:
        raise Conflict(f"entity {given.name} exists with another key; use another name for the new one")
    return PlannedChange(
        kind="entity", name=given.name, change=ChangeKind.NEW if found is None else ChangeKind.UNCHANGED
    )


def _planned_view(
    tx: Transaction, found: StoredObject | None, given: FeatureView, keys: tuple[Feature, ...], keep: KeepRows
) -> PlannedChange:
    before = None if found is None else store.find_view(tx, found)
    if before is None:
        return PlannedChange(kind="view", name=given.name, change=ChangeKind.NEW, version=1)
    if found is not None and not _keeps_label(found.own_label, before.definition.own_label, given.own_label):
        raise Conflict(
            f"view {given.name}: a new version must keep the label, with those of its columns; add to it with "
            "objects.label first"
        )
    given = stated(given, before)
    differences = _differences(before, given, keys)
    if not differences:
        return PlannedChange(
            kind="view", name=given.name, change=ChangeKind.UNCHANGED, version=before.version
        )
    kept = rows_that_fit(before, given, keys, keep=keep) if before.rows else None
    return PlannedChange(
        kind="view",
        name=given.name,
        change=ChangeKind.CHANGED,
        version=before.version + 1,
        differences=differences,
        kept_rows=None if kept is None else before.rows if kept.fit else 0,
        notes=() if kept is None else kept.notes,
    )


def _keeps_label(stored: Label, before: Label, given: Label) -> bool:
    """Tell whether a definition lifts no restriction of the last one, and adds none that the view does not have."""
    return before | given == given and (stored | given == stored or given == before)


def _differences(before: StoredView, given: FeatureView, keys: tuple[Feature, ...]) -> tuple[str, ...]:
    old = before.definition
    fields = [name for name in type(given).model_fields if getattr(old, name) != getattr(given, name)]
    return tuple(fields) + (("keys",) if before.keys != keys else ())


def stated(given: FeatureView, before: StoredView | None) -> FeatureView:
    """Return the definition with `known_at`: as given, else as before, else a default that cannot leak."""
    if given.created_time is not None:
        known_at = KnownAt.CREATED_TIME
    elif before is None or before.definition.created_time is not None:
        known_at = given.known_at or KnownAt.INGESTION
    else:
        known_at = given.known_at or before.known_at
    return given.model_copy(update={"known_at": known_at})


def keys_of(
    tx: Transaction, workspace: StoredObject, given: FeatureView, known: dict[str, Entity]
) -> tuple[Feature, ...]:
    """Return the key columns of a view, from the entities given in the same call (`known`) or stored ones."""
    keys = []
    for name in given.entities:
        entity = known.get(name)
        if entity is None:
            entity = store.load_entity(tx, objects.resolve(tx, name, kind="entity", workspace=workspace.name))
        keys.append(Feature(name=entity.key, type=entity.type))
    require_distinct_columns(given, tuple(keys))
    return tuple(keys)


def _require_unique(where: str, names: list[str]) -> None:
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        raise InvalidInput.at(where, given=", ".join(sorted(duplicates)), allowed="each name once")


# ---------------------------------------------------------------------------------------------- inference


class FileColumn(NamedTuple):
    """A column of a file; `type` is none if no view can store it."""

    name: str
    type: ColumnType | None


def infer_features(
    columns: Sequence[FileColumn],
    *,
    rows: int,
    name: str,
    entity: str | None,
    key: str | None,
    event_time: str | None,
) -> InferredFeatures:
    """Return an entity and a view that fit `columns`; InvalidInput if there is no key or no time among them."""
    usable = [each for each in columns if each.type is not None and _is_valid(_column, each.name)]
    moment = _event_time(usable, event_time)
    chosen = _key_column(usable, key)
    created = next((each.name for each in usable if each.name in CREATED and _is_moment(each)), None)
    created = None if created == moment else created
    features = [
        Feature(name=each.name, type=each.type)
        for each in usable
        if each.type is not None and each.name not in (moment, chosen.name, created)
    ]
    if not features:
        raise _wrong("columns", columns, "a column that is neither the key nor a time")
    kind = chosen.type or ColumnType.TEXT
    subject = Entity(name=entity or _entity_name(chosen.name), key=chosen.name, type=kind)
    try:
        view = FeatureView(
            name=name,
            entities=(subject.name,),
            columns=tuple(features),
            event_time=moment,
            created_time=created,
        )
    except ValidationError as error:  # of the file: too many columns, or names that collide
        raise invalid("features.infer", error) from None
    require_distinct_columns(view, (Feature(name=subject.key, type=subject.type),))
    known = set(usable)
    skipped = tuple(each.name for each in columns if each not in known)
    return InferredFeatures(entity=subject, view=view, rows=rows, skipped=skipped)


def _event_time(columns: Sequence[FileColumn], given: str | None) -> str:
    """Return the column of event times: the one given, `event_time`, or the first of times."""
    moments = [each.name for each in columns if _is_moment(each)]
    if given is not None and given not in moments:
        raise _wrong("event_time", columns, "a column of times, such as 2026-01-31T09:00:00Z", given=given)
    first = next((name for name in moments if name not in CREATED), None)
    found = given or ("event_time" if "event_time" in moments else first or next(iter(moments), None))
    if found is None:
        raise _wrong("event_time", columns, "a column of times, such as 2026-01-31T09:00:00Z")
    return found


def _key_column(columns: Sequence[FileColumn], given: str | None) -> FileColumn:
    """Return the column of keys: the one given, the first that is named like one, or the first that may be one."""
    fitting = [each for each in columns if each.type in KEY_TYPES]
    if given is not None:
        fitting = [each for each in fitting if each.name == given]
    named = [each for each in fitting if _KEY.search(each.name)]
    if not fitting:
        raise _wrong("key", columns, "a column of whole numbers or text", given=given)
    return (named or fitting)[0]


def _entity_name(key: str) -> str:
    """Return `customer` for the key customer_id."""
    plain = re.sub(r"[^a-z0-9]+", "-", _KEY.sub("", key).lower()).strip("-")
    return plain if _is_valid(_name, plain) else "entity"


def _is_moment(column: FileColumn) -> bool:
    return column.type is ColumnType.MOMENT


def _is_valid(rule: TypeAdapter[str], text: str) -> bool:
    try:
        rule.validate_python(text)
    except ValidationError:
        return False
    return True


def _wrong(
    where: str, columns: Sequence[FileColumn], allowed: str, *, given: str | None = None
) -> InvalidInput:
    shown = ", ".join(f"{each.name} ({each.type or 'unusable'})" for each in columns[:20])
    return InvalidInput.at(where, given=given or "none", allowed=f"{allowed}; the file has {shown}")
