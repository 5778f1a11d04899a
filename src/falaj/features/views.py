"""The rows of views: ingested, stored and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from falaj.errors import Conflict
from falaj.features import store
from falaj.features.aggregations import aggregated_rows, newest_windows
from falaj.features.joins import ARRIVAL, JoinedView
from falaj.features.sources import require_permission, uploaded_rows
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ArrowStream
from falaj.ports.metadata import Transaction
from falaj.ports.queries import ArrowInput, ArrowTable, QueryEngine
from falaj.ports.tables import TableStore
from falaj.records.features import ColumnType, Feature, IngestResult, StoredView
from falaj.records.governance.objects import StoredObject

TRIES = 5
"""How often an ingestion is tried when others come between."""


@dataclass(frozen=True)
class FeatureBackends:
    """What the room stands on; stores are by zone."""

    gate: Gate
    blobs: Mapping[str, EncryptedBlobs]
    tables: Mapping[str, TableStore]
    queries: QueryEngine


def ingest(backends: FeatureBackends, call: Call, blob: StoredObject) -> IngestResult:
    """Transform the rows of `blob` and add them to the view that is the call's target."""
    gate = backends.gate
    with gate.database.read() as tx:
        _require_zone(gate, tx, call, blob)
        view = store.load_view(tx, call.target)
    texts = frozenset(
        each.name for each in (*view.keys, *view.definition.columns) if each.type is ColumnType.TEXT
    )
    rows = _transformed(backends, view, uploaded_rows(gate, backends.blobs, call, blob, texts=texts))
    for left in reversed(range(TRIES)):
        try:
            return _publish(backends, call, view, rows)
        except Conflict:
            if not left:
                raise
        with gate.database.read() as tx:
            view = store.load_view(tx, call.target, version=view.version)
    raise AssertionError("the last try raises")


def stored_rows(backends: FeatureBackends, view: StoredView) -> ArrowInput:
    """The rows of a view as they are pinned. Conflict if there are none yet."""
    if view.table_version is None:
        name = view.definition.name
        raise Conflict(f"view {name} version {view.version} has no rows; features.ingest adds some")
    return backends.tables[view.zone].read(store.view_table(view), version=view.table_version)


def stream(backends: FeatureBackends, view: StoredView) -> ArrowStream:
    """The stored rows of a view, batch by batch."""
    from falaj.features import arrow_tables

    return arrow_tables.stream_batches(stored_rows(backends, view))


def feature_rows(backends: FeatureBackends, view: StoredView) -> ArrowInput:
    """The rows of a view with its features: as stored, or aggregated."""
    from falaj.features import arrow_tables

    rows = stored_rows(backends, view)
    if not view.definition.aggregations:
        return arrow_tables.in_memory_if_small(rows)
    return backends.queries.select(aggregated_rows(view, "source"), {"source": rows})


def newest_feature_rows(backends: FeatureBackends, view: StoredView) -> ArrowInput:
    """The same, of the newest row of each key at least: of aggregated views no others, because that is quicker."""
    if not view.definition.aggregations:
        return stored_rows(backends, view)
    recent = backends.queries.select(newest_windows(view, "source"), {"source": stored_rows(backends, view)})
    return backends.queries.select(aggregated_rows(view, "source"), {"source": recent})


def join_input(view: StoredView, rows: str, *, prefix: str = "") -> JoinedView:
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
            require_permission(gate, tx, call, "features.scan", each)
        return [store.load_view(tx, each) for each in found]


def _require_zone(gate: Gate, tx: Transaction, call: Call, blob: StoredObject) -> None:
    seen = partial(gate.authorizer.sees, tx, call.caller)
    gate.zones.require(tx, [blob], gate.zones.named(call.target.zone), seen=seen)


def _transformed(backends: FeatureBackends, view: StoredView, source: ArrowTable) -> ArrowTable:
    from falaj.features import arrow_tables

    if view.definition.sql is not None:
        source = backends.queries.select(view.definition.sql, {"source": source})
    needed = _required(view)
    required = frozenset(column.name for column in needed)
    where = f"view {view.definition.name}"
    return arrow_tables.conform(source, needed + view.definition.columns, required=required, where=where)


def _required(view: StoredView) -> tuple[Feature, ...]:
    """The columns that every row of a view has a value in: its keys and moments."""
    moments = [view.definition.event_time, view.definition.created_time]
    return view.keys + tuple(Feature(name=name, type=ColumnType.MOMENT) for name in moments if name)


def _publish(backends: FeatureBackends, call: Call, view: StoredView, rows: ArrowTable) -> IngestResult:
    from falaj.features import arrow_tables

    numbered, table = arrow_tables.with_row_numbers(rows, ARRIVAL, start=view.rows), store.view_table(view)
    tables = backends.tables[view.zone]
    if view.table_version is None:
        written = tables.overwrite(table, numbered)
    else:
        written = tables.append(table, numbered, onto=view.table_version)
    total = view.rows + rows.num_rows

    def publish() -> IngestResult:
        blob = call.object("data")
        _require_zone(backends.gate, call.tx, call, blob)
        store.publish_rows(call, view, table_version=written, rows=total)
        graph.flow(call, [blob], call.target)
        return IngestResult(
            view=view.id, version=view.version, table_version=written, added=rows.num_rows, rows=total
        )

    return backends.gate.commit(call, publish)
