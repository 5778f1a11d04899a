"""Ingest, store and read the rows of feature views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from falaj.errors import Conflict, InvalidInput
from falaj.features import store
from falaj.features.aggregations import aggregate, newest_windows
from falaj.features.backends import FeatureBackends
from falaj.features.joins import ARRIVAL, INGESTED, JoinedView, created_column
from falaj.features.sources import ViewRows, content_hash, rechecked_rows, view_rows
from falaj.features.table_versions import files as table_files
from falaj.features.validation import batches
from falaj.features.validation.batches import WrittenBatch
from falaj.governance.audit.deep import TABLE
from falaj.governance.encryption.keyring import require_living_key
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ArrowStream
from falaj.ports.machine.memory import MemoryLease
from falaj.ports.metadata import Transaction
from falaj.ports.queries import ArrowInput
from falaj.ports.tables import TableKey
from falaj.records.features import IngestResult, KnownAt, StoredView
from falaj.records.governance.objects import StoredObject

MAX_ATTEMPTS = 5
"""Attempts to publish an ingestion; a cleanup may remove its files before."""
WAIT_S = 45.0
"""How long an ingestion waits for others of the same view; clients give up after 60 s."""


@dataclass(frozen=True)
class _Upload:
    """How rows came in: the SHA-256 of the upload, whether it is added once more, and whether its rows are history.

    `invalid` has those that break a rule.
    """

    content: str
    again: bool
    backfill: bool
    invalid: WrittenBatch | None = None


def ingest(
    backends: FeatureBackends,
    call: Call,
    target: StoredObject,
    blob: StoredObject,
    *,
    strict: bool,
    again: bool,
    backfill: bool,
) -> IngestResult:
    """Transform the rows of `blob` and add them to the newest version of the view `target`."""
    gate = backends.gate
    while True:
        with gate.database.read() as tx:
            _require_zone(gate, tx, call, target, blob)
            view = store.load_view(tx, target)
            content = content_hash(backends, call, tx, blob)
            since = None if strict or again else store.ingested_at(tx, view, content)
        if backfill and view.known_at is KnownAt.CREATED_TIME:
            allowed = f"no back-fill: {view.definition.created_time} says when a row of this view was known"
            raise InvalidInput.at("backfill", given=backfill, allowed=allowed)
        if since is not None:
            return _already(backends, call, view, since)
        with backends.budget.lease() as memory:
            rows = view_rows(backends, call, blob, view, strict=strict, backfill=backfill, memory=memory)
            with batches.written(backends, view, rows.invalid) as invalid:
                upload = _Upload(content, again, backfill, invalid)
                if (done := _add(backends, call, target, view, rows, upload)) is not None:
                    return done


def ingest_quarantined(backends: FeatureBackends, call: Call, batch: StoredObject) -> IngestResult:
    """Add those rows of a quarantined batch that break no rule of the view any more; the others stay."""
    gate = backends.gate
    with gate.database.read() as tx:
        target = batches.view_of(tx, batch)
        gate.require(call, "features.ingest", target, tx=tx)
        view = store.load_view(tx, target)
    with writing_turn(backends, view), backends.budget.lease() as memory:
        try:
            with gate.database.read() as tx:
                view, facts = store.load_view(tx, target), store.load_quarantined(tx, batch)
                source = batches.source(backends, tx, batch)
                _require_file(tx, view, facts["sha256"])
        except Conflict as error:
            return gate.commit(call, partial(_refuse, error))  # a repeated call gets its first answer
        rows = rechecked_rows(backends, call, source, view, memory=memory)
        if not rows.rows.num_rows:
            return gate.commit(call, lambda: batches.still_quarantined(batch, rows, _unchanged(view)))
        with batches.written(backends, view, rows.invalid) as left:
            known_from = _known_from(view, gate.clock(), is_history=facts["is_history"])

            def record(done: IngestResult) -> IngestResult:
                return batches.keep_left(backends, call, facts, rows, left, done)

            return _publish(backends, call, view, rows, known_from=known_from, record=record)


def _require_file(tx: Transaction, view: StoredView, content: str) -> None:
    """Raise Conflict if a version does not have the other rows of the file, such as one that kept no rows.

    The whole file can be ingested there: its invalid rows would come in twice.
    """
    if store.ingested_at(tx, view, content) is None:
        raise Conflict(
            f"version {view.version} of view {view.definition.name} does not have the other rows of the file; "
            "ingest the file again, and discard this batch"
        )


def _unchanged(view: StoredView) -> IngestResult:
    return IngestResult(
        view=view.id, version=view.version, table_version=view.table_version or 0, added=0, rows=view.rows
    )


def _refuse(error: Conflict) -> IngestResult:
    raise error


def _add(
    backends: FeatureBackends,
    call: Call,
    target: StoredObject,
    view: StoredView,
    given: ViewRows,
    upload: _Upload,
) -> IngestResult | None:
    """Publish rows when it is their turn. Return None if the view has a new version: they may not fit it."""
    with writing_turn(backends, view):
        for left in reversed(range(MAX_ATTEMPTS)):
            with backends.gate.database.read() as tx:
                now = store.load_view(tx, target)
                since = None if upload.again else store.ingested_at(tx, now, upload.content)
            if now.version != view.version:
                return None
            try:
                if since is not None:
                    return _already(backends, call, now, since, notes=given.notes)
                return _publish_upload(backends, call, now, given, upload)
            except Conflict:
                if not left:
                    raise
    raise AssertionError("the last attempt raises")


def writing_turn(backends: FeatureBackends, view: StoredView) -> AbstractContextManager[None]:
    """Wait for the turn to change the rows of a view, in whichever version."""
    subject = f"view {view.definition.name}: its rows are being changed"
    return backends.tables[view.zone].turn(store.write_queue(view), wait_s=WAIT_S, subject=subject)


def stored_rows(backends: FeatureBackends, view: StoredView) -> ArrowInput:
    """Return the pinned rows of a view. Raise Conflict if it has none."""
    if view.table_version is None:
        name = view.definition.name
        raise Conflict(f"view {name} version {view.version} has no rows; add some with features.ingest")
    return pinned_rows(backends, view.zone, store.view_table(view), view.table_version)


def pinned_rows(backends: FeatureBackends, zone: str, table: TableKey, number: int) -> ArrowInput:
    """Return the rows of a published version of a table. Raise Damaged if its files are not what was written."""
    with backends.gate.database.read() as tx:
        version = table_files.load_version(tx, table, number)
    return backends.tables[zone].read(table, version=version)


def stream(backends: FeatureBackends, view: StoredView) -> ArrowStream:
    """Stream the stored rows of a view in the order in which they arrived."""
    from falaj.features import arrow_tables

    rows = stored_rows(backends, view)
    return arrow_tables.stream_in_order(rows, ARRIVAL, rows.schema.names)


def feature_rows(backends: FeatureBackends, view: StoredView, *, memory: MemoryLease) -> ArrowInput:
    """Return the rows of a view with its features, aggregated where the view defines aggregations."""
    from falaj.features import arrow_tables

    rows = stored_rows(backends, view)
    if not view.definition.aggregations:
        return arrow_tables.in_memory_if_small(rows, memory=memory)
    return aggregate(backends.queries, view, rows)


def newest_feature_rows(backends: FeatureBackends, view: StoredView, *, since: int) -> ArrowInput:
    """Return feature rows that include those known newest from `since` on; aggregated views omit the older ones."""
    if not view.definition.aggregations:
        return stored_rows(backends, view)
    windows = newest_windows(view, "source", since=since)
    recent = backends.queries.select(windows, {"source": stored_rows(backends, view)})
    return aggregate(backends.queries, view, recent)


def join_input(view: StoredView, rows: str, *, prefix: str = "") -> JoinedView:
    """Describe a view for a join; `prefix` is put before the names of its features."""
    definition = view.definition
    return JoinedView(
        rows=rows,
        keys=tuple(key.name for key in view.keys),
        event_time=definition.event_time,
        created_time=created_column(view),
        ttl=definition.ttl,
        features={feature.name: prefix + feature.name for feature in definition.features},
    )


def require_scan(gate: Gate, call: Call, found: Sequence[StoredObject]) -> list[StoredView]:
    """Return the newest versions of views. Raise Denied unless the caller may read their rows."""
    with gate.database.read() as tx:
        for each in found:
            gate.require(call, "features.scan", each, tx=tx)
        return [store.load_view(tx, each) for each in found]


def _require_zone(gate: Gate, tx: Transaction, call: Call, target: StoredObject, blob: StoredObject) -> None:
    seen = partial(gate.authorizer.sees, tx, call.caller)
    gate.zones.require(tx, [blob], gate.zones.named(target.zone), seen=seen)


def _known_from(view: StoredView, now: datetime, *, is_history: bool) -> datetime | None:
    """Return since when rows that come in now are known; none if that is their event or created time.

    The first rows of a view are its history: they were known when they happened.
    """
    return now if view.known_at is KnownAt.INGESTION and view.rows and not is_history else None


def _publish_upload(
    backends: FeatureBackends, call: Call, view: StoredView, given: ViewRows, upload: _Upload
) -> IngestResult:
    known_from = _known_from(view, backends.gate.clock(), is_history=upload.backfill)

    def record(done: IngestResult) -> IngestResult:
        target, blob = call.object("view"), call.object("data")
        _require_zone(backends.gate, call.tx, call, target, blob)
        store.add_ingestion(call, view, upload.content)
        graph.flow(call, [blob], target)
        if upload.invalid is None:
            return done
        is_history = known_from is None
        return batches.add(
            backends, call, view, given, upload.invalid, done, sha256=upload.content, is_history=is_history
        )

    return _publish(backends, call, view, given, known_from=known_from, record=record)


def _publish(
    backends: FeatureBackends,
    call: Call,
    view: StoredView,
    given: ViewRows,
    *,
    known_from: datetime | None,
    record: Callable[[IngestResult], IngestResult],
) -> IngestResult:
    """Write rows behind those of a view and publish them; `record` stores what else belongs to that transaction."""
    from falaj.features import arrow_tables

    numbered = arrow_tables.with_row_numbers(given.rows, ARRIVAL, start=view.rows)
    if view.known_at is KnownAt.INGESTION:
        numbered = arrow_tables.with_moment(numbered, INGESTED, known_from)
    table, tables = store.view_table(view), backends.tables[view.zone]
    onto = None
    if view.table_version is not None:
        with backends.gate.database.read() as tx:
            onto = table_files.load_version(tx, table, view.table_version)
    written = tables.overwrite(table, numbered) if onto is None else tables.append(table, numbered, onto=onto)
    total = view.rows + numbered.num_rows

    def publish() -> IngestResult:
        require_living_key(call.tx, view.workspace)
        table_files.require_stored(tables, table, written)
        table_files.publish_version(call.tx, table, written, onto=onto)
        store.publish_rows(call, view, table_version=written.number, rows=total)
        call.publish(TABLE, f"{view.zone}/{table}", version=written.number, digest=written.digest)
        return record(
            IngestResult(
                view=view.id,
                version=view.version,
                table_version=written.number,
                added=numbered.num_rows,
                rows=total,
                known_from=known_from,
                notes=given.notes,
            )
        )

    return backends.gate.commit(call, publish)


def _already(
    backends: FeatureBackends, call: Call, view: StoredView, since: datetime, *, notes: tuple[str, ...] = ()
) -> IngestResult:
    """Answer that an upload was added before. Its label is kept: it may have been uploaded with another one."""

    def publish() -> IngestResult:
        target, blob = call.object("view"), call.object("data")
        _require_zone(backends.gate, call.tx, call, target, blob)
        graph.flow(call, [blob], target)
        return _unchanged(view).model_copy(update={"notes": notes, "already_since": since})

    return backends.gate.commit(call, publish)
