"""Create monitors, and pin the references that they compare with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from falaj.errors import AlreadyExists, Damaged, Denied, InvalidInput
from falaj.governance import objects
from falaj.governance.encryption.keyring import require_living_key
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ArrowStream
from falaj.monitoring import alerts, store
from falaj.monitoring.dependencies import MonitoringContext
from falaj.monitoring.drift.dependence import BlockCounter
from falaj.monitoring.sketches.columns import kind_of
from falaj.monitoring.sketches.sketch_store import SketchStore
from falaj.monitoring.sketches.sketchers import sketch_reference
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.monitors import Monitor, MonitorWindow
from falaj.records.monitoring.sketches import FalseAlarmBudget, ReferenceSketch
from falaj.records.names import ObjectId, new_id

EVENT_TIME = "event_time"
TIMES = "\0times"
"""The key of the rows' times in a batch: no column has this name."""


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
        if (same := _made_before(context, call, name or endpoint.name, row)) is not None:
            return same
        new = call.create("monitor", name or endpoint.name, workspace=now, zone=zone, ident=ident)
        return store.add_monitor(call.tx, new, row)

    return context.gate.commit(call, publish)


def _made_before(context: MonitoringContext, call: Call, name: str, row: dict[str, Any]) -> Monitor | None:
    """Return the monitor `name` if it does what `row` says; AlreadyExists if it does something else."""
    workspace = call.object("workspace")
    found = objects.by_name(call.tx, workspace=workspace.id, kind="monitor", name=name)
    if found is None or not context.gate.visible([found]):
        return None
    known = store.monitor_row(call.tx, found.id)
    if all(known[key] == value for key, value in row.items() if key != "reference"):
        return store.monitor_record(call.tx, found)
    raise AlreadyExists(
        f"there is already a monitor {name!r} with another reference, columns, window or budget; give this one another "
        f"name, or set its reference: falaj monitoring set-reference {name} --reference TRAINING-SET"
    )


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
    pinned = _sketch_training_set(context, dataset, columns=columns)
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
    context: MonitoringContext, dataset: StoredObject, *, columns: Sequence[str] | None
) -> ReferenceSketch:
    """Sketch `columns`, or by default every column that can be watched, and how they spread over time."""
    stream, training_set = context.training_set(dataset), dataset.name
    types = {field.name: field.type for field in stream.schema}
    names = _chosen(types, columns)
    kinds = {name: kind_of(pa.array([], types[name])) for name in names}
    times = TimeRange(time_column(types))
    reference = sketch_reference(
        training_set, times.follow(_batches(stream, names, times.column)), kinds=kinds
    )
    if not any(sketch.rows for sketch in reference.features):
        raise InvalidInput.at(
            "reference", given=f"{training_set}, which has no rows", allowed="a training set with rows"
        )
    if times.column is None or times.first is None or times.last is None:
        return reference
    counter = BlockCounter(reference, first=times.first, last=times.last)
    for batch in _batches(context.training_set(dataset), names, times.column):
        count_blocks(counter, batch)
    return reference.model_copy(update={"spreads": counter.spreads()})


@dataclass
class TimeRange:
    """The earliest and the latest time of the rows that pass, in microseconds; `column` has the times, if any."""

    column: str | None
    first: int | None = None
    last: int | None = None

    def follow(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the batches without the column of times, unless it is watched."""
        for batch in batches:
            times = batch.pop(TIMES, None)
            if times is not None and len(times) > times.null_count:
                found = pc.min_max(times).as_py()
                self.first = found["min"] if self.first is None else min(self.first, found["min"])
                self.last = found["max"] if self.last is None else max(self.last, found["max"])
            yield batch


def time_column(types: Mapping[str, Any]) -> str | None:
    """Return the column with the times of rows: `event_time`, or the only one of timestamps."""
    moments = [name for name, kind in types.items() if pa.types.is_timestamp(kind)]
    if EVENT_TIME in moments:
        return EVENT_TIME
    return moments[0] if len(moments) == 1 else None


def count_blocks(counter: BlockCounter, batch: dict[str, Any]) -> None:
    """Count the rows of a batch that have a time."""
    times = batch.pop(TIMES)
    if times.null_count:
        known = times.is_valid()
        times, batch = times.filter(known), {name: column.filter(known) for name, column in batch.items()}
    counter.add(np.asarray(times.to_numpy(zero_copy_only=False), np.int64), batch)


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


def _batches(stream: ArrowStream, names: list[str], times: str | None) -> Iterator[dict[str, Any]]:
    """Yield the columns `names`, and the times of the rows in microseconds as `TIMES`."""
    for batch in stream:
        columns = {name: batch.column(name) for name in names}
        if times is not None:
            moments = batch.column(times)
            zone = moments.type.tz
            columns[TIMES] = moments.cast(pa.timestamp("us", tz=zone), safe=False).cast(pa.int64())
        yield columns
