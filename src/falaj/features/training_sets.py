"""Training sets: a spine joined with views as they were known at each row's time, pinned and stored."""

from __future__ import annotations

from falaj.errors import Fault, InvalidInput
from falaj.features import store
from falaj.features.joining import join
from falaj.features.joins import ROW
from falaj.features.sources import uploaded_rows
from falaj.features.views import Backing, feature_rows, joined, require_scan
from falaj.governance.call import Call
from falaj.governance.operations import ArrowStream
from falaj.ports.queries import ArrowTable
from falaj.records.features import ColumnType, Feature, PinnedView, StoredView, TrainingSet
from falaj.records.names import new_id
from falaj.records.objects import StoredObject


def build(backing: Backing, call: Call, *, name: str, event_time: str) -> TrainingSet:
    """Join, store and publish what the call asks for."""
    spine_blob, zone = call.object("spine"), backing.gate.zones.named(call.zone).name
    views = require_scan(backing.gate, call, call.referred["views"])
    spine = _checked_spine(uploaded_rows(backing.gate, backing.blobs, call, spine_blob), views, event_time)
    found = _join(backing, spine, views, event_time)
    ident = new_id("dataset")
    table = store.training_table(call.target.id, ident)
    version = backing.tables[zone].overwrite(table, found)

    def publish() -> TrainingSet:
        new = call.create("dataset", name, workspace=call.target, zone=zone, ident=ident)
        facts = {
            "spine": spine_blob.id,
            "event_time": event_time,
            "views": [_pin(view).model_dump(mode="json") for view in views],
            "columns": found.column_names,
            "table_version": version,
            "rows": found.num_rows,
        }
        return store.add_training_set(call, new, facts)

    made = backing.gate.commit(call, publish)
    if made.id != ident:  # the same call was made before, under the same idempotency key
        backing.tables[zone].delete(table)
    return made


def stream(backing: Backing, found: StoredObject) -> ArrowStream:
    """The rows of a training set, in the order of its spine."""
    from falaj.features import frames

    with backing.gate.database.read() as tx:
        made = store.training_set(tx, found)
    table = store.training_table(made.workspace, made.id)
    return frames.streamed(backing.tables[made.zone].read(table, version=made.table_version))


def _join(backing: Backing, spine: ArrowTable, views: list[StoredView], event_time: str) -> ArrowTable:
    from falaj.features import frames

    columns = spine.column_names
    parts = [
        joined(view, f"view{number}", prefix=f"{view.definition.name}__") for number, view in enumerate(views)
    ]
    inputs = {f"view{number}": feature_rows(backing, view) for number, view in enumerate(views)}
    inputs["spine"] = frames.numbered(spine, ROW)
    return join(backing.queries, inputs, columns, event_time=event_time, views=parts)


def _checked_spine(spine: ArrowTable, views: list[StoredView], event_time: str) -> ArrowTable:
    """The spine with keys and time in their types. Rows without them are kept: they find nothing."""
    from falaj.features import frames

    made = {
        f"{view.definition.name}__{feature.name}" for view in views for feature in view.definition.features
    }
    taken = [name for name in spine.column_names if name in made or name.startswith("__")]
    if taken or len(set(spine.column_names)) < len(spine.column_names):
        allowed = "columns named once, none like a feature's, none beginning with '__'"
        raise InvalidInput(
            "the columns of the spine do not fit",
            faults=[Fault(where="spine", given=", ".join(taken or spine.column_names), allowed=allowed)],
        )
    typed = {key.name: key for view in views for key in view.keys}
    typed[event_time] = Feature(name=event_time, type=ColumnType.MOMENT)
    fitting = frames.conform(spine, tuple(typed.values()), required=frozenset(), where="spine")
    for name in fitting.column_names:
        spine = spine.set_column(spine.column_names.index(name), name, fitting[name])
    return spine


def _pin(view: StoredView) -> PinnedView:
    return PinnedView(view=view.id, version=view.version, table_version=view.table_version or 0)
