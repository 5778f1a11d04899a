"""Ingest, store and read the rows of feature views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

MAX_ATTEMPTS = 5
"""Attempts to publish an ingestion when others commit concurrently."""


@dataclass(frozen=True)
class FeatureBackends:
    """The gate and the stores that the feature store works with; stores are keyed by zone."""

    gate: Gate
    blobs: Mapping[str, EncryptedBlobs]
    tables: Mapping[str, TableStore]
    queries: QueryEngine


def ingest(backends: FeatureBackends, call: Call, target: StoredObject, blob: StoredObject) -> IngestResult:
    """Transform the rows of `blob` and add them to the newest version of the view `target`."""
    gate = backends.gate
    with gate.database.read() as tx:
        _require_zone(gate, tx, call, target, blob)
        view = store.load_view(tx, target)
    texts = frozenset(
        each.name for each in (*view.keys, *view.definition.columns) if each.type is ColumnType.TEXT
    )
    rows = _transformed(backends, view, uploaded_rows(gate, backends.blobs, call, blob, texts=texts))
    for left in reversed(range(MAX_ATTEMPTS)):
        try:
            return _publish(backends, call, view, rows)
        except Conflict:
            if not left:
                raise
        with gate.database.read() as tx:
            view = store.load_view(tx, target, version=view.version)
    raise AssertionError("the last attempt raises")


def stored_rows(backends: FeatureBackends, view: StoredView) -> ArrowInput:
    """Return the pinned rows of a view. Raise Conflict if it has none."""
    if view.table_version is None:
        name = view.definition.name
        raise Conflict(f"view {name} version {view.version} has no rows; add some with features.ingest")
    return backends.tables[view.zone].read(store.view_table(view), version=view.table_version)


def stream(backends: FeatureBackends, view: StoredView) -> ArrowStream:
    """Stream the stored rows of a view in batches."""
    from falaj.features import arrow_tables

    return arrow_tables.stream_batches(stored_rows(backends, view))


def feature_rows(backends: FeatureBackends, view: StoredView) -> ArrowInput:
    """Return the rows of a view with its features, aggregated where the view defines aggregations."""
    from falaj.features import arrow_tables

    rows = stored_rows(backends, view)
    if not view.definition.aggregations:
        return arrow_tables.in_memory_if_small(rows)
    return backends.queries.select(aggregated_rows(view, "source"), {"source": rows})


def newest_feature_rows(backends: FeatureBackends, view: StoredView) -> ArrowInput:
    """Return feature rows that include the newest row of each key; aggregated views omit the older ones."""
    if not view.definition.aggregations:
        return stored_rows(backends, view)
    recent = backends.queries.select(newest_windows(view, "source"), {"source": stored_rows(backends, view)})
    return backends.queries.select(aggregated_rows(view, "source"), {"source": recent})


def join_input(view: StoredView, rows: str, *, prefix: str = "") -> JoinedView:
    """Describe a view for a join; `prefix` is put before the names of its features."""
    definition = view.definition
    return JoinedView(
        rows=rows,
        keys=tuple(key.name for key in view.keys),
        event_time=definition.event_time,
        created_time=definition.created_time,
        ttl=definition.ttl,
        features={feature.name: prefix + feature.name for feature in definition.features},
    )


def require_scan(gate: Gate, call: Call, found: Sequence[StoredObject]) -> list[StoredView]:
    """Return the newest versions of views. Raise Denied unless the caller may read their rows."""
    with gate.database.read() as tx:
        for each in found:
            require_permission(gate, tx, call, "features.scan", each)
        return [store.load_view(tx, each) for each in found]


def _require_zone(gate: Gate, tx: Transaction, call: Call, target: StoredObject, blob: StoredObject) -> None:
    seen = partial(gate.authorizer.sees, tx, call.caller)
    gate.zones.require(tx, [blob], gate.zones.named(target.zone), seen=seen)


def _transformed(backends: FeatureBackends, view: StoredView, source: ArrowTable) -> ArrowTable:
    from falaj.features import arrow_tables

    if view.definition.sql is not None:
        source = backends.queries.select(view.definition.sql, {"source": source})
    needed = _required(view)
    required = frozenset(column.name for column in needed)
    where = f"view {view.definition.name}"
    return arrow_tables.conform(source, needed + view.definition.columns, required=required, where=where)


def _required(view: StoredView) -> tuple[Feature, ...]:
    """Return the columns that must not be null: keys, event time and created time."""
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
        target, blob = call.object("view"), call.object("data")
        _require_zone(backends.gate, call.tx, call, target, blob)
        store.publish_rows(call, view, table_version=written, rows=total)
        graph.flow(call, [blob], target)
        return IngestResult(
            view=view.id, version=view.version, table_version=written, added=rows.num_rows, rows=total
        )

    return backends.gate.commit(call, publish)
