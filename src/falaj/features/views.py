"""Views: applied as definitions, each change a new version; and their rows, ingested and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from falaj.errors import Conflict, InvalidInput, NotFound, ResidencyDenied
from falaj.features import store
from falaj.features.aggregations import aggregated_rows
from falaj.features.joins import ARRIVAL, JoinedView
from falaj.features.sources import require, uploaded_rows
from falaj.governance import objects
from falaj.governance.call import Call
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.gate import Gate
from falaj.governance.operations import ArrowStream
from falaj.ports.metadata import Transaction
from falaj.ports.queries import ArrowInput, ArrowTable, Queries
from falaj.ports.tables import TableStore
from falaj.records.features import ColumnType, Entity, Feature, FeatureView, Ingested, StoredView
from falaj.records.objects import StoredObject
from falaj.records.residency import Zone

TRIES = 5
"""How often an ingestion is tried when others come between."""


@dataclass(frozen=True)
class Backing:
    """What the room stands on; stores are by zone."""

    gate: Gate
    blobs: Mapping[str, EncryptedBlobs]
    tables: Mapping[str, TableStore]
    queries: Queries


def apply_entity(call: Call, given: Entity) -> bool:
    """Whether the entity is new. One that is there may not change: views were built on it."""
    found = objects.by_name(call.tx, workspace=call.target.id, kind="entity", name=given.name)
    if found is None:
        store.add_entity(call, call.create("entity", given.name, workspace=call.target), given)
        return True
    if store.entity(call.tx, found) != given:
        raise Conflict(f"entity {given.name} is there with another key; give the new one another name")
    return False


def apply_view(call: Call, given: FeatureView, zone: Zone) -> StoredView:
    """The view as it is now: the same version if nothing changed, else a new one."""
    keys = _keys(call, given)
    found = objects.by_name(call.tx, workspace=call.target.id, kind="view", name=given.name)
    if found is None:
        if not given.own_label.permits(zone.jurisdiction):
            words = f"view {given.name} ({given.own_label.describe()}) may not lie in zone {zone.name}"
            raise ResidencyDenied(f"{words} ({zone.jurisdiction})")
        found = call.create("view", given.name, workspace=call.target, zone=zone.name, own=given.own_label)
        store.add_view(call, found.id, 1, given, keys)
    else:
        before = newest(call.tx, found)
        if before.definition.own_label != given.own_label:
            raise Conflict(f"view {given.name}: a new version keeps its label; object.label changes it")
        if (before.definition, before.keys) != (given, keys):
            store.add_view(call, found.id, before.version + 1, given, keys)
    return newest(call.tx, found)


def newest(tx: Transaction, found: StoredObject, *, version: int | None = None) -> StoredView:
    view = store.view(tx, found, version=version)
    if view is None:
        raise NotFound(f"view {found.name} has no version {version}")
    return view


def ingest(backing: Backing, call: Call, blob: StoredObject) -> Ingested:
    """Transform the rows of `blob` and add them to the view that is the call's target."""
    gate = backing.gate
    with gate.database.read() as tx:
        _require_zone(gate, tx, call, blob)
        view = newest(tx, call.target)
    rows = _transformed(backing, view, uploaded_rows(gate, backing.blobs, call, blob))
    for left in reversed(range(TRIES)):
        try:
            return _publish(backing, call, view, rows)
        except Conflict:
            if not left:
                raise
        with gate.database.read() as tx:
            view = newest(tx, call.target, version=view.version)
    raise AssertionError("the last try raises")


def stored_rows(backing: Backing, view: StoredView) -> ArrowInput:
    """The rows of a view as they are pinned. Conflict if there are none yet."""
    if view.table_version is None:
        name = view.definition.name
        raise Conflict(f"view {name} version {view.version} has no rows; features.ingest adds some")
    return backing.tables[view.zone].read(store.view_table(view), version=view.table_version)


def stream(backing: Backing, view: StoredView) -> ArrowStream:
    """The stored rows of a view, batch by batch."""
    from falaj.features import frames

    return frames.streamed(stored_rows(backing, view))


def feature_rows(backing: Backing, view: StoredView) -> ArrowInput:
    """The rows of a view with its features: as stored, or aggregated."""
    rows = stored_rows(backing, view)
    if not view.definition.aggregations:
        return rows
    return backing.queries.select(aggregated_rows(view, "source"), {"source": rows})


def joined(view: StoredView, rows: str, *, prefix: str = "") -> JoinedView:
    """A view for a join, its features named with `prefix`."""
    definition = view.definition
    return JoinedView(
        rows=rows,
        keys=tuple(key.name for key in view.keys),
        event_time=definition.event_time,
        created_time=definition.created_time,
        ttl=definition.ttl,
        features={feature.name: prefix + feature.name for feature in definition.features},
    )


def require_scan(gate: Gate, call: Call, found: list[StoredObject]) -> list[StoredView]:
    """The newest versions of views whose rows the caller may read."""
    with gate.database.read() as tx:
        for each in found:
            require(gate, tx, call, "features.scan", each)
        return [newest(tx, each) for each in found]


def _keys(call: Call, given: FeatureView) -> tuple[Feature, ...]:
    keys = []
    for name in given.entities:
        found = objects.resolve(call.tx, name, kind="entity", workspace=call.target.name)
        entity = store.entity(call.tx, found)
        keys.append(Feature(name=entity.key, type=entity.type))
    taken = [each.name for each in (*given.columns, *given.features)] + [given.event_time, given.created_time]
    twice = [key.name for key in keys if key.name in taken or keys.count(key) > 1]
    if twice:
        raise InvalidInput.at(f"view {given.name}", given=", ".join(twice), allowed="key columns named once")
    return tuple(keys)


def _require_zone(gate: Gate, tx: Transaction, call: Call, blob: StoredObject) -> None:
    seen = partial(gate.authorizer.sees, tx, call.caller)
    gate.zones.require(tx, [blob], gate.zones.named(call.target.zone), seen=seen)


def _transformed(backing: Backing, view: StoredView, source: ArrowTable) -> ArrowTable:
    from falaj.features import frames

    if view.definition.sql is not None:
        source = backing.queries.select(view.definition.sql, {"source": source})
    needed = _required(view)
    required = frozenset(column.name for column in needed)
    where = f"view {view.definition.name}"
    return frames.conform(source, needed + view.definition.columns, required=required, where=where)


def _required(view: StoredView) -> tuple[Feature, ...]:
    """The columns that every row of a view has a value in: its keys and moments."""
    moments = [view.definition.event_time, view.definition.created_time]
    return view.keys + tuple(Feature(name=name, type=ColumnType.MOMENT) for name in moments if name)


def _publish(backing: Backing, call: Call, view: StoredView, rows: ArrowTable) -> Ingested:
    from falaj.features import frames

    numbered, table = frames.numbered(rows, ARRIVAL, start=view.rows), store.view_table(view)
    tables = backing.tables[view.zone]
    if view.table_version is None:
        written = tables.overwrite(table, numbered)
    else:
        written = tables.append(table, numbered, onto=view.table_version)
    total = view.rows + rows.num_rows

    def publish() -> Ingested:
        blob = call.object("data")
        _require_zone(backing.gate, call.tx, call, blob)
        store.publish_rows(call, view, table_version=written, rows=total)
        store.flow(call, blob, call.target)
        return Ingested(
            view=view.id, version=view.version, table_version=written, added=rows.num_rows, rows=total
        )

    return backing.gate.commit(call, publish)
