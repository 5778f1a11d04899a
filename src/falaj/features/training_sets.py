"""Training sets: a spine joined point-in-time with views; inputs are pinned and the result is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from falaj.errors import AlreadyExists, FalajError, Unavailable
from falaj.features import store
from falaj.features.backends import FeatureBackends
from falaj.features.joins import ROW, join
from falaj.features.spines import Spine, SpineSpan, keep_spine, load_spine
from falaj.features.table_versions import files as table_files
from falaj.features.views import feature_rows, join_input, pinned_rows, require_scan
from falaj.governance import objects
from falaj.governance.audit.deep import TABLE
from falaj.governance.encryption.keyring import require_living_key
from falaj.governance.operations.call import Call
from falaj.governance.operations.operation import ArrowStream
from falaj.governance.tables import blobs
from falaj.ports.machine.memory import MemoryLease
from falaj.ports.metadata import Transaction
from falaj.ports.queries import ArrowTable
from falaj.records.expressions.declarations import resolve_features
from falaj.records.features import ColumnOrigin, RequestFeature, StoredView, TrainingSet, pin_of
from falaj.records.governance.objects import StoredObject
from falaj.records.names import new_id

COMPUTED_BYTES = 9
"""What a computed value takes: eight bytes, and its bit of validity."""


@dataclass(frozen=True)
class TrainingSources:
    """The objects that a training set is built from: a blob or a view as its spine, and views."""

    spine: StoredObject
    views: Sequence[StoredObject]


def build(
    backends: FeatureBackends,
    call: Call,
    sources: TrainingSources,
    *,
    name: str,
    workspace: StoredObject,
    zone: str,
    span: SpineSpan,
    event_time: str | None,
    request_features: Sequence[RequestFeature] = (),
) -> TrainingSet:
    """Join, compute, store and publish the training set `name` in workspace `workspace`."""
    with backends.leased() as (leased, memory):
        views = require_scan(backends.gate, call, sources.views)
        spine = load_spine(
            leased, call, sources.spine, views, span=span, event_time=event_time, memory=memory
        )
        computed = _resolved(spine, views, request_features)
        found = _with_computed(_joined(leased, spine, views, memory), computed, memory)
        return _store(backends, call, name, workspace, zone, spine, views, computed, found)


def _resolved(
    spine: Spine, views: list[StoredView], features: Sequence[RequestFeature]
) -> tuple[RequestFeature, ...]:
    """Return the request-time features with the types of what they use. Raise InvalidInput with all faults."""
    if not features:
        return ()
    from falaj.features.request_time import training_columns

    known = training_columns.column_types(spine.rows)
    for view in views:
        known |= {f"{view.definition.name}__{each.name}": each.type for each in view.definition.features}
    return resolve_features(features, known, where="request_features")


def _with_computed(rows: ArrowTable, features: Sequence[RequestFeature], memory: MemoryLease) -> ArrowTable:
    """Return the joined rows with the columns that are computed from them."""
    if not features:
        return rows
    from falaj.features.request_time import training_columns

    memory.grow(rows.num_rows * len(features) * COMPUTED_BYTES)
    return training_columns.add_columns(rows, features)


def _store(
    backends: FeatureBackends,
    call: Call,
    name: str,
    workspace: StoredObject,
    zone: str,
    spine: Spine,
    views: list[StoredView],
    computed: Sequence[RequestFeature],
    found: ArrowTable,
) -> TrainingSet:
    """Write the joined rows, which are in the order of the spine, and publish them as the training set `name`."""
    from falaj.features import arrow_tables

    ident = new_id("dataset")
    table = store.training_table(workspace.id, ident)
    tables = backends.tables[zone]
    written = tables.overwrite(table, arrow_tables.with_row_numbers(found, ROW))

    def publish() -> TrainingSet:
        now = call.object("workspace")  # found anew at the commit point
        inputs = _pinned_inputs(call.object("spine"), spine, views, computed)
        if (same := _made_before(backends, call, now, name, zone, inputs)) is not None:
            return same.model_copy(update={"notes": spine.notes})
        require_living_key(call.tx, workspace.id)
        table_files.require_stored(tables, table, written)
        table_files.publish_version(call.tx, table, written)
        new = call.create("dataset", name, workspace=now, zone=zone, ident=ident)
        result = {"columns": found.column_names, "table_version": written.number, "rows": found.num_rows}
        keep_spine(backends, call, call.object("spine"))
        call.publish(TABLE, f"{zone}/{table}", version=written.number, digest=written.digest)
        return store.add_training_set(call, new, inputs | result).model_copy(update={"notes": spine.notes})

    try:
        made = backends.gate.commit(call, publish)
    except Unavailable:  # it may have been published; if not, a cleanup removes it
        raise
    except FalajError:
        tables.delete(table)
        raise
    if made.id != ident:  # it was made before, by the same call or from the same inputs
        tables.delete(table)
    return made


def _made_before(
    backends: FeatureBackends,
    call: Call,
    workspace: StoredObject,
    name: str,
    zone: str,
    inputs: dict[str, Any],
) -> TrainingSet | None:
    """Return the training set `name` if it was made from the same inputs; AlreadyExists if it was made from others."""
    found = objects.by_name(call.tx, workspace=workspace.id, kind="dataset", name=name)
    if found is None or not backends.gate.visible([found]):
        return None  # a name that the caller may not know of is refused as taken
    made = store.load_training_set(call.tx, found)
    before = {
        "spine_pin": None if made.spine_pin is None else made.spine_pin.model_dump(mode="json"),
        "since": made.since,
        "until": made.until,
        "event_time": made.event_time,
        "views": [view.model_dump(mode="json") for view in made.views],
        "request_features": [each.model_dump(mode="json") for each in made.request_features],
    }
    is_same = made.zone == zone and inputs == before | {"spine": inputs["spine"]}
    if is_same and _has_spine(call, made, inputs["spine"]):
        return made
    raise AlreadyExists(
        f"there is already a training set {name!r}, made from other rows or features, or in another zone; it is "
        "immutable, so choose another name"
    )


def _has_spine(call: Call, made: TrainingSet, spine: str) -> bool:
    """Tell whether `spine` is the one of `made`, or an upload of the same bytes."""
    query = select(blobs.c.sha256).where(blobs.c.id.in_([made.spine, spine]))
    digests = list(call.tx.execute(query).scalars())
    return made.spine == spine or (len(digests) == 2 and digests[0] == digests[1])


def column_origins(tx: Transaction, made: TrainingSet) -> tuple[ColumnOrigin, ...]:
    """Return where each column of a training set comes from."""
    found: dict[str, ColumnOrigin] = {
        each.name: ColumnOrigin(column=each.name, expression=each.expression)
        for each in made.request_features
    }
    for pinned in made.views:
        stored = objects.ever(tx, pinned.view)
        view = None if stored is None else store.find_view(tx, stored, version=pinned.version)
        for feature in () if view is None else view.definition.features:
            column = f"{view.definition.name}__{feature.name}" if view is not None else ""
            found[column] = ColumnOrigin(
                column=column,
                view=None if stored is None else stored.name,
                view_id=pinned.view,
                view_version=pinned.version,
                field=feature.name,
            )
    return tuple(found.get(column) or ColumnOrigin(column=column) for column in made.columns)


def stream(backends: FeatureBackends, found: StoredObject) -> ArrowStream:
    """Stream the rows of a training set, in the order of its spine."""
    from falaj.features import arrow_tables

    with backends.gate.database.read() as tx:
        made = store.load_training_set(tx, found)
    table = store.training_table(made.workspace, made.id)
    rows = pinned_rows(backends, made.zone, table, made.table_version)
    return arrow_tables.stream_in_order(rows, ROW, made.columns)


def _joined(
    backends: FeatureBackends, spine: Spine, views: list[StoredView], memory: MemoryLease
) -> ArrowTable:
    from falaj.features import arrow_tables

    parts = [
        join_input(view, f"view{number}", prefix=f"{view.definition.name}__")
        for number, view in enumerate(views)
    ]
    inputs = {
        f"view{number}": feature_rows(backends, view, memory=memory) for number, view in enumerate(views)
    }
    inputs["spine"] = arrow_tables.with_row_numbers(spine.rows, ROW)
    return join(backends.queries, inputs, spine.rows.column_names, event_time=spine.event_time, views=parts)


def _pinned_inputs(
    source: StoredObject, spine: Spine, views: list[StoredView], computed: Sequence[RequestFeature]
) -> dict[str, Any]:
    """Return the columns that pin what was read, so that it can be read again."""
    return {
        "spine": source.id,
        "spine_pin": None if spine.pin is None else spine.pin.model_dump(mode="json"),
        "since": spine.since,
        "until": spine.until,
        "event_time": spine.event_time,
        "views": [pin_of(view).model_dump(mode="json") for view in views],
        "request_features": [each.model_dump(mode="json") for each in computed],
    }
