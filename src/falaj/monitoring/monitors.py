"""Create monitors, and pin the references that they compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from falaj.errors import Damaged, Denied, InvalidInput
from falaj.governance import objects
from falaj.governance.encryption.keyring import require_living_key
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ArrowStream
from falaj.monitoring import alerts, store
from falaj.monitoring.dependencies import MonitoringContext
from falaj.monitoring.sketches.columns import kind_of
from falaj.monitoring.sketches.sketch_store import SketchStore
from falaj.monitoring.sketches.sketchers import sketch_reference
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.monitors import Monitor, MonitorWindow
from falaj.records.monitoring.sketches import FalseAlarmBudget, ReferenceSketch
from falaj.records.names import ObjectId, new_id


@dataclass(frozen=True)
class MonitoredEndpoint:
    """An endpoint, and the training set that it is compared with."""

    endpoint: StoredObject
    reference: StoredObject


def watch(
    context: MonitoringContext,
    call: Call,
    watched: MonitoredEndpoint,
    *,
    columns: tuple[str, ...] | None,
    window: MonitorWindow,
    budget: FalseAlarmBudget,
    name: str | None,
    workspace: StoredObject,
) -> Monitor:
    """Create a monitor in `workspace` that compares an endpoint with a training set."""
    endpoint, ident = watched.endpoint, new_id("monitor")
    if endpoint.workspace != workspace.id:
        raise InvalidInput.at(
            "endpoint", given=endpoint.address, allowed=f"an endpoint of workspace {workspace.name}"
        )
    pinned = _pinned(context, call, watched, monitor=ident, columns=columns)
    row = pinned | {"window": window.model_dump(mode="json"), "budget": budget.model_dump(mode="json")}

    def publish() -> Monitor:
        require_living_key(call.tx, endpoint.workspace)
        zone = context.gate.zones.default.name
        now = call.object("workspace")  # found anew at the commit point
        new = call.create("monitor", name or endpoint.name, workspace=now, zone=zone, ident=ident)
        return store.add_monitor(call.tx, new, row)

    return context.gate.commit(call, publish)


def set_reference(
    context: MonitoringContext, call: Call, monitor: StoredObject, reference: StoredObject
) -> Monitor:
    """Set another reference for a monitor and restart it."""
    ident = monitor.id
    with context.gate.database.read() as tx:
        row = store.monitor_row(tx, ident)
        endpoint = _endpoint(tx, row["endpoint"])
    columns = None if row["all_columns"] else tuple(row["columns"])
    pinned = _pinned(context, call, MonitoredEndpoint(endpoint, reference), monitor=ident, columns=columns)

    def publish() -> Monitor:
        require_living_key(call.tx, endpoint.workspace)
        alerts.end_open_alert(call, ident)
        store.replace_reference(call.tx, ident, pinned)
        graph.flow(call, [call.object("reference")], call.object("monitor"))
        return store.monitor_record(call.tx, objects.by_id(call.tx, ident) or monitor)

    return context.gate.commit(call, publish)


def _pinned(
    context: MonitoringContext,
    call: Call,
    watched: MonitoredEndpoint,
    *,
    monitor: ObjectId,
    columns: tuple[str, ...] | None,
) -> dict[str, Any]:
    """Sketch the reference, and return the columns of the monitor's row that pin it."""
    endpoint, dataset = watched.endpoint, watched.reference
    _require_readable(context.gate, call, dataset, endpoint)
    pinned = _sketch_training_set(context.training_set(dataset), training_set=dataset.name, columns=columns)
    return {
        "endpoint": endpoint.id,
        "training_set": dataset.id,
        "columns": [sketch.name for sketch in pinned.features],
        "all_columns": columns is None,
        "reference_rows": max(sketch.rows for sketch in pinned.features),
        "reference": SketchStore(context.sealed, endpoint.workspace).seal_reference(pinned, monitor=monitor),
    }


def _require_readable(gate: Gate, call: Call, dataset: StoredObject, endpoint: StoredObject) -> None:
    """Raise unless the caller may read the training set and its sketches may lie in the default zone.

    Sketches lie in the metadata database, which is in the default zone.
    """
    with gate.database.read() as tx:
        decision = gate.authorizer.decide(tx, call.caller, "features.load", dataset)
        if not decision.allowed:
            raise Denied(f"{call.caller.name} may not features.load on {dataset.address}: {decision.reason}")
        seen = partial(gate.authorizer.sees, tx, call.caller)
        gate.zones.require(tx, [dataset, endpoint], gate.zones.default, seen=seen)


def _endpoint(tx: Transaction, ident: str) -> StoredObject:
    found = objects.ever(tx, ident)
    if found is None:
        raise Damaged(f"the object of endpoint {ident} is missing")
    return found


def _sketch_training_set(
    stream: ArrowStream, *, training_set: str, columns: Sequence[str] | None
) -> ReferenceSketch:
    """Sketch `columns`, or by default every column that can be watched."""
    types = {field.name: field.type for field in stream.schema}
    names = _chosen(types, columns)
    kinds = {name: kind_of(pa.array([], types[name])) for name in names}
    reference = sketch_reference(training_set, _batches(stream, names), kinds=kinds)
    if not any(sketch.rows for sketch in reference.features):
        raise InvalidInput.at(
            "reference", given=f"{training_set}, which has no rows", allowed="a training set with rows"
        )
    return reference


def _chosen(types: dict[str, Any], columns: Sequence[str] | None) -> list[str]:
    able = [name for name, kind in types.items() if _can_be_watched(kind)]
    if columns is None:
        if not able:
            raise InvalidInput.at(
                "reference",
                given="a training set without numbers, times, text or booleans",
                allowed="one with a column that can be watched",
            )
        return able
    wrong = [name for name in columns if name not in able]
    if wrong:
        raise InvalidInput.at(
            "columns",
            given=", ".join(wrong),
            allowed=f"columns of the training set that can be watched: {', '.join(able)}",
        )
    return list(columns)


def _can_be_watched(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = ("integer", "floating", "decimal", "boolean", "temporal", "string", "large_string", "string_view")
    return any(getattr(pa.types, f"is_{test}")(kind) for test in tests)


def _batches(stream: ArrowStream, names: list[str]) -> Iterator[dict[str, Any]]:
    for batch in stream:
        yield {name: batch.column(name) for name in names}
