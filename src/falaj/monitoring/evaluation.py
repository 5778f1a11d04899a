"""Evaluate complete windows: merge and compare sketches outside any transaction, then publish the results."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from falaj.errors import Damaged, KeyUnavailable
from falaj.governance import objects
from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.monitoring import alerts, store
from falaj.monitoring.drift.baselines import (
    DriftBaseline,
    compare_with_baseline,
    extend_own_reference,
    merge_compatible,
)
from falaj.monitoring.sketches.sketch_store import SketchStore
from falaj.monitoring.windows.slots import WindowSlot, complete_windows
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.monitors import EvaluationSummary, MonitorWindow
from falaj.records.monitoring.sketches import FalseAlarmBudget, ModelDrift, ReferenceSketch, WindowSketch
from falaj.records.names import ObjectId

log = logging.getLogger("falaj.monitoring")

UNREADABLE_RETRY = timedelta(hours=1)
"""Delay before a position with unreadable sketches is evaluated again: their key is destroyed, or they are damaged."""


@dataclass(frozen=True)
class WindowResult:
    """The result of a complete window, with its last slot and its rows."""

    last_seq: int
    rows: int
    drift: ModelDrift


@dataclass(frozen=True)
class PositionProgress:
    """The results of a due position; `own` is the new own reference of the version."""

    row: dict[str, Any]
    results: tuple[WindowResult, ...]
    own: ReferenceSketch | None
    sealed_own: bytes | None


def evaluate(gate: Gate, call: Call, sealed: SealedValues, due: list[dict[str, Any]]) -> EvaluationSummary:
    """Evaluate the due positions, and publish all results in one commit."""
    progress = [_evaluate_position(gate, call, sealed, row) for row in due]

    def publish() -> EvaluationSummary:
        windows = 0
        raised: list[ObjectId] = []
        ended: list[ObjectId] = []
        for each in sorted(progress, key=lambda p: (p.row["endpoint"], p.row["monitor"], p.row["version"])):
            if _is_current(call.tx, each):
                for result in each.results:
                    changes = _update_alert(call, each, result)
                    raised += changes.raised
                    ended += changes.ended
                windows += len(each.results)
                _store_progress(call, each)
        return EvaluationSummary(windows=windows, raised=tuple(raised), ended=tuple(ended))

    return gate.commit(call, publish)


def load_baseline(
    sketches: SketchStore, monitor: dict[str, Any], *, ident: str, version: str, own: bytes | None
) -> DriftBaseline:
    """Load the baseline of the windows of `version`."""
    pinned = sketches.open_reference(monitor["reference"], monitor=ident)
    return DriftBaseline(
        pinned=pinned,
        own=sketches.open_reference(own, monitor=ident, version=version)
        if own
        else ReferenceSketch(training_set=pinned.training_set, features=()),
        chosen=None if monitor["all_columns"] else frozenset(monitor["columns"]),
        budget=FalseAlarmBudget.model_validate(monitor["budget"]),
    )


def load_slots(
    sketches: SketchStore, slots: list[WindowSlot], *, endpoint: str, version: str
) -> list[WindowSketch]:
    """Load the sketches of the slots of one window."""
    return [
        sketches.open_window(slot.sealed, endpoint=endpoint, version=version, seq=slot.seq) for slot in slots
    ]


def _evaluate_position(gate: Gate, call: Call, sealed: SealedValues, row: dict[str, Any]) -> PositionProgress:
    monitor, version, endpoint = row["monitor"], row["version"], row["endpoint"]
    with gate.database.read() as tx:
        found = objects.ever(tx, endpoint)
        slots = store.slots_after(tx, endpoint, version, seq=row["judged_seq"])
    sketches = SketchStore(sealed, found.workspace if found else "")
    try:
        baseline = load_baseline(sketches, row, ident=monitor, version=version, own=row["own_reference"])
        results = []
        for part in complete_windows(slots, MonitorWindow.model_validate(row["window"]), now=call.now):
            loaded = load_slots(sketches, part, endpoint=endpoint, version=version)
            window = merge_compatible(loaded)
            rows = sum(slot.rows for slot in part)
            drift = compare_with_baseline(window, baseline, parts=loaded)
            results.append(WindowResult(part[-1].seq, rows, drift))
            baseline = DriftBaseline(
                baseline.pinned, extend_own_reference(window, baseline), baseline.chosen, baseline.budget
            )
        own = baseline.own if baseline.own.features else None
        kept = None if own is None else sketches.seal_reference(own, monitor=monitor, version=version)
        return PositionProgress(row, tuple(results), own, kept)
    except (KeyUnavailable, Damaged) as problem:
        log.warning("window evaluation failed", extra={"monitor": monitor, "reason": problem.message})
        return PositionProgress(row, (), None, None)


def _is_current(tx: Transaction, each: PositionProgress) -> bool:
    """Return whether the evaluated slots are unchanged: not evaluated, merged or removed concurrently."""
    row, version = each.row, each.row["version"]
    store.lock_endpoint(tx, row["endpoint"])
    if store.judged_seq_of(tx, row["monitor"], version) != row["judged_seq"]:
        return False
    return store.has_slots(tx, row["endpoint"], version, [result.last_seq for result in each.results])


def _update_alert(call: Call, each: PositionProgress, result: WindowResult) -> EvaluationSummary:
    """Raise, extend or end the alert of the monitor."""
    monitor = _monitor(call.tx, each.row["monitor"])
    is_open, drift = store.open_alert(call.tx, monitor.id), result.drift
    if is_open is not None:
        if alerts.end_if_resolved(call.tx, is_open, drift):
            return EvaluationSummary(ended=(ObjectId(is_open),))
        if drift.drifted:
            alerts.extend_alert(call.tx, is_open, drift)
        return EvaluationSummary()
    if not drift.drifted:
        return EvaluationSummary()
    earlier = sum(other.rows for other in each.results if other.last_seq <= result.last_seq)
    facts = {
        "endpoint": each.row["endpoint"],
        "rows": result.rows,
        "rows_seen": each.row["rows"] + earlier,
    }
    return EvaluationSummary(raised=(alerts.raise_alert(call, monitor, drift, facts),))


def _store_progress(call: Call, each: PositionProgress) -> None:
    row = each.row
    position = row["monitor"], row["version"]
    if not each.results:
        store.set_position(call.tx, *position, due_at=call.now + UNREADABLE_RETRY)
        return
    last = each.results[-1]
    own = [] if each.own is None else [sketch.name for sketch in each.own.features]
    store.set_position(
        call.tx,
        *position,
        judged_seq=last.last_seq,
        judged_until=last.drift.until,
        verdict=last.drift.verdict,
        windows=row["windows"] + len(each.results),
        rows=row["rows"] + sum(result.rows for result in each.results),
        own_columns=own,
        own_reference=each.sealed_own,
        report=last.drift.model_dump(mode="json"),
    )
    window = MonitorWindow.model_validate(row["window"])
    store.refresh_waiting(call.tx, *position, endpoint=row["endpoint"], window=window)


def _monitor(tx: Transaction, ident: str) -> StoredObject:
    found = objects.ever(tx, ident)
    if found is None:
        raise Damaged(f"the object of monitor {ident} is missing")
    return found
