"""Make monitors, and pin what they compare with."""

from __future__ import annotations

from functools import partial
from typing import Any

from falaj.errors import Damaged, Denied, InvalidInput
from falaj.governance import objects
from falaj.governance.encryption.keyring import require_living_key
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.monitoring import alerts, store
from falaj.monitoring.dependencies import MonitoringContext
from falaj.monitoring.sketches.reference import sketch_training_set
from falaj.monitoring.sketches.sketch_store import SketchStore
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.monitors import Monitor, MonitorWindow
from falaj.records.monitoring.sketches import FalseAlarmBudget
from falaj.records.names import ObjectId, new_id


def watch(
    context: MonitoringContext,
    call: Call,
    columns: tuple[str, ...] | None,
    window: MonitorWindow,
    budget: FalseAlarmBudget,
    *,
    name: str | None,
) -> Monitor:
    """A new monitor of the call's endpoint, on the call's reference."""
    endpoint, ident = call.object("endpoint"), new_id("monitor")
    if endpoint.workspace != call.target.id:
        raise InvalidInput.at(
            "endpoint", given=endpoint.address, allowed=f"an endpoint of workspace {call.target.name}"
        )
    pinned = _pinned(context, call, endpoint, monitor=ident, columns=columns)
    row = pinned | {"window": window.model_dump(mode="json"), "budget": budget.model_dump(mode="json")}

    def publish() -> Monitor:
        require_living_key(call.tx, endpoint.workspace)
        zone = context.gate.zones.default.name
        new = call.create("monitor", name or endpoint.name, workspace=call.target, zone=zone, ident=ident)
        return store.add_monitor(call.tx, new, row)

    return context.gate.commit(call, publish)


def rebase(context: MonitoringContext, call: Call) -> Monitor:
    """The call's monitor on another reference; it begins anew."""
    ident = call.target.id
    with context.gate.database.read() as tx:
        row = store.monitor_row(tx, ident)
        endpoint = _endpoint(tx, row["endpoint"])
    columns = None if row["all_columns"] else tuple(row["columns"])
    pinned = _pinned(context, call, endpoint, monitor=ident, columns=columns)

    def publish() -> Monitor:
        require_living_key(call.tx, endpoint.workspace)
        alerts.end_open_alert(call, ident)
        store.replace_reference(call.tx, ident, pinned)
        graph.flow(call, [call.object("reference")], call.target)
        return store.monitor_record(call.tx, objects.by_id(call.tx, ident) or call.target)

    return context.gate.commit(call, publish)


def _pinned(
    context: MonitoringContext,
    call: Call,
    endpoint: StoredObject,
    *,
    monitor: ObjectId,
    columns: tuple[str, ...] | None,
) -> dict[str, Any]:
    """What a monitor keeps of its reference."""
    dataset = call.object("reference")
    _require_readable(context.gate, call, dataset, endpoint)
    pinned = sketch_training_set(context.training_set(dataset), training_set=dataset.name, columns=columns)
    return {
        "endpoint": endpoint.id,
        "training_set": dataset.id,
        "columns": [sketch.name for sketch in pinned.features],
        "all_columns": columns is None,
        "reference_rows": max(sketch.rows for sketch in pinned.features),
        "reference": SketchStore(context.sealed, endpoint.workspace).seal_reference(pinned, monitor=monitor),
    }


def _require_readable(gate: Gate, call: Call, dataset: StoredObject, endpoint: StoredObject) -> None:
    """The caller may read the training set, and what is sketched of it may lie here.

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
        raise Damaged(f"endpoint {ident} has lost its object")
    return found
