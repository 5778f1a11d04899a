"""Training sets: a spine joined with views as they were known at each row's time, pinned and stored."""

from __future__ import annotations

from typing import Any

from falaj.errors import FalajError
from falaj.features import store
from falaj.features.joins import ROW, join
from falaj.features.spines import Spine, keep_spine, load_spine
from falaj.features.views import FeatureBackends, feature_rows, join_input, require_scan
from falaj.governance.operations.call import Call
from falaj.governance.operations.operation import ArrowStream
from falaj.ports.queries import ArrowTable
from falaj.records.features import StoredView, TrainingSet, pin_of
from falaj.records.governance.objects import StoredObject
from falaj.records.names import new_id


def build(backends: FeatureBackends, call: Call, *, name: str) -> TrainingSet:
    """Join, store and publish what the call asks for."""
    zone = backends.gate.zones.named(call.zone).name
    views = require_scan(backends.gate, call, call.referred["views"])
    spine = load_spine(backends, call, views)
    found = _joined(backends, spine, views)
    ident = new_id("dataset")
    table = store.training_table(call.target.id, ident)
    version = backends.tables[zone].overwrite(table, found)

    def publish() -> TrainingSet:
        new = call.create("dataset", name, workspace=call.target, zone=zone, ident=ident)
        result = {"columns": found.column_names, "table_version": version, "rows": found.num_rows}
        keep_spine(backends, call)
        return store.add_training_set(call, new, _facts(call, spine, views) | result)

    try:
        made = backends.gate.commit(call, publish)
    except FalajError:
        backends.tables[zone].delete(table)
        raise
    if made.id != ident:  # the same call was made before, under the same idempotency key
        backends.tables[zone].delete(table)
    return made


def stream(backends: FeatureBackends, found: StoredObject) -> ArrowStream:
    """The rows of a training set, in the order of its spine."""
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


def _facts(call: Call, spine: Spine, views: list[StoredView]) -> dict[str, Any]:
    """What was read, so that the same can be read again."""
    return {
        "spine": call.object("spine").id,
        "spine_pin": None if spine.pin is None else spine.pin.model_dump(mode="json"),
        "since": spine.since,
        "until": spine.until,
        "event_time": spine.event_time,
        "views": [pin_of(view).model_dump(mode="json") for view in views],
    }
