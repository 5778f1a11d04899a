"""Training sets: a spine joined point-in-time with views; inputs are pinned and the result is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from falaj.errors import FalajError
from falaj.features import store
from falaj.features.joins import ROW, join
from falaj.features.spines import Spine, SpineSpan, keep_spine, load_spine
from falaj.features.views import FeatureBackends, feature_rows, join_input, require_scan
from falaj.governance.operations.call import Call
from falaj.governance.operations.operation import ArrowStream
from falaj.ports.queries import ArrowTable
from falaj.records.features import StoredView, TrainingSet, pin_of
from falaj.records.governance.objects import StoredObject
from falaj.records.names import new_id


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
) -> TrainingSet:
    """Join, store and publish the training set `name` in workspace `workspace`."""
    views = require_scan(backends.gate, call, sources.views)
    spine = load_spine(backends, call, sources.spine, views, span=span, event_time=event_time)
    found = _joined(backends, spine, views)
    ident = new_id("dataset")
    table = store.training_table(workspace.id, ident)
    version = backends.tables[zone].overwrite(table, found)

    def publish() -> TrainingSet:
        now = call.object("workspace")  # found anew at the commit point
        new = call.create("dataset", name, workspace=now, zone=zone, ident=ident)
        result = {"columns": found.column_names, "table_version": version, "rows": found.num_rows}
        keep_spine(backends, call, call.object("spine"))
        inputs = _pinned_inputs(call.object("spine"), spine, views)
        return store.add_training_set(call, new, inputs | result)

    try:
        made = backends.gate.commit(call, publish)
    except FalajError:
        backends.tables[zone].delete(table)
        raise
    if made.id != ident:  # the same call was made before, under the same idempotency key
        backends.tables[zone].delete(table)
    return made


def stream(backends: FeatureBackends, found: StoredObject) -> ArrowStream:
    """Stream the rows of a training set, in the order of its spine."""
    from falaj.features import arrow_tables

    with backends.gate.database.read() as tx:
        made = store.load_training_set(tx, found)
    table = store.training_table(made.workspace, made.id)
    return arrow_tables.stream_batches(backends.tables[made.zone].read(table, version=made.table_version))


def _joined(backends: FeatureBackends, spine: Spine, views: list[StoredView]) -> ArrowTable:
    from falaj.features import arrow_tables

    parts = [
        join_input(view, f"view{number}", prefix=f"{view.definition.name}__")
        for number, view in enumerate(views)
    ]
    inputs = {f"view{number}": feature_rows(backends, view) for number, view in enumerate(views)}
    inputs["spine"] = arrow_tables.with_row_numbers(spine.rows, ROW)
    return join(backends.queries, inputs, spine.rows.column_names, event_time=spine.event_time, views=parts)


def _pinned_inputs(source: StoredObject, spine: Spine, views: list[StoredView]) -> dict[str, Any]:
    """Return the columns that pin what was read, so that it can be read again."""
    return {
        "spine": source.id,
        "spine_pin": None if spine.pin is None else spine.pin.model_dump(mode="json"),
        "since": spine.since,
        "until": spine.until,
        "event_time": spine.event_time,
        "views": [pin_of(view).model_dump(mode="json") for view in views],
    }
