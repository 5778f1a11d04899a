"""Judge the windows that are complete: sketches are merged and compared outside any transaction, then published."""

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

UNREADABLE = timedelta(hours=1)
"""So long a position rests whose sketches cannot be read, for their key was destroyed or they are damaged."""


@dataclass(frozen=True)
class JudgedWindow:
    """A complete window: its last slot, its rows, and what was found."""

    last_seq: int
    rows: int
    drift: ModelDrift


@dataclass(frozen=True)
class PositionProgress:
    """What a due position came to; `own` is the version's own reference from now on."""

    row: dict[str, Any]
    judged: tuple[JudgedWindow, ...]
    own: ReferenceSketch | None
    sealed_own: bytes | None


def evaluate(gate: Gate, call: Call, sealed: SealedValues, due: list[dict[str, Any]]) -> EvaluationSummary:
    """Judge the due positions, and publish all that came of it in one commit."""
    progress = [_judge(gate, call, sealed, row) for row in due]

    def publish() -> EvaluationSummary:
        windows = 0
        raised: list[ObjectId] = []
        ended: list[ObjectId] = []
        for each in sorted(progress, key=lambda p: (p.row["endpoint"], p.row["monitor"], p.row["version"])):
            if _still_holds(call.tx, each):
                for judged in each.judged:
                    news = _follow(call, each, judged)
                    raised += news.raised
                    ended += news.ended
                windows += len(each.judged)
                _write_down(call, each)
        return EvaluationSummary(windows=windows, raised=tuple(raised), ended=tuple(ended))

    return gate.commit(call, publish)


def load_baseline(
    sketches: SketchStore, monitor: dict[str, Any], *, ident: str, version: str, own: bytes | None
) -> DriftBaseline:
    """What windows of `version` are compared with."""
    pinned = sketches.open_reference(monitor["reference"], monitor=ident)
    return DriftBaseline(
        pinned=pinned,
        own=sketches.open_reference(own, monitor=ident, version=version)
        if own
        else ReferenceSketch(training_set=pinned.training_set, features=()),
        chosen=None if monitor["all_columns"] else frozenset(monitor["columns"]),
        budget=FalseAlarmBudget.model_validate(monitor["budget"]),
    )


def load_window(
    sketches: SketchStore, slots: list[WindowSlot], *, endpoint: str, version: str
) -> WindowSketch:
    """The sketches of `slots` as one window."""
    return merge_compatible(
        [
            sketches.open_window(slot.sealed, endpoint=endpoint, version=version, seq=slot.seq)
            for slot in slots
        ]
    )


def _judge(gate: Gate, call: Call, sealed: SealedValues, row: dict[str, Any]) -> PositionProgress:
    monitor, version, endpoint = row["monitor"], row["version"], row["endpoint"]
    with gate.database.read() as tx:
        found = objects.ever(tx, endpoint)
        slots = store.slots_after(tx, endpoint, version, seq=row["judged_seq"])
    sketches = SketchStore(sealed, found.workspace if found else "")
    try:
        baseline = load_baseline(sketches, row, ident=monitor, version=version, own=row["own_reference"])
        judged = []
        for part in complete_windows(slots, MonitorWindow.model_validate(row["window"]), now=call.now):
            window = load_window(sketches, part, endpoint=endpoint, version=version)
            rows = sum(slot.rows for slot in part)
            judged.append(JudgedWindow(part[-1].seq, rows, compare_with_baseline(window, baseline)))
            baseline = DriftBaseline(
                baseline.pinned, extend_own_reference(window, baseline), baseline.chosen, baseline.budget
            )
        own = baseline.own if baseline.own.features else None
        kept = None if own is None else sketches.seal_reference(own, monitor=monitor, version=version)
        return PositionProgress(row, tuple(judged), own, kept)
    except (KeyUnavailable, Damaged) as problem:
        log.warning("windows cannot be judged", extra={"monitor": monitor, "reason": problem.message})
        return PositionProgress(row, (), None, None)


def _still_holds(tx: Transaction, each: PositionProgress) -> bool:
    """Whether nobody else judged these windows meanwhile, nor merged them with later ones, nor removed the monitor."""
    row, version = each.row, each.row["version"]
    store.lock_endpoint(tx, row["endpoint"])
    if store.judged_seq_of(tx, row["monitor"], version) != row["judged_seq"]:
        return False
    return store.has_slots(tx, row["endpoint"], version, [judged.last_seq for judged in each.judged])


def _follow(call: Call, each: PositionProgress, judged: JudgedWindow) -> EvaluationSummary:
    """Raise, continue or end the alert of the monitor."""
    monitor = _monitor(call.tx, each.row["monitor"])
    is_open, drift = store.open_alert(call.tx, monitor.id), judged.drift
    if is_open is not None:
        if alerts.end_if_resolved(call.tx, is_open, drift):
            return EvaluationSummary(ended=(ObjectId(is_open),))
        if drift.drifted:
            alerts.extend_alert(call.tx, is_open, drift)
        return EvaluationSummary()
    if not drift.drifted:
        return EvaluationSummary()
    earlier = sum(other.rows for other in each.judged if other.last_seq <= judged.last_seq)
    facts = {
        "endpoint": each.row["endpoint"],
        "rows": judged.rows,
        "rows_seen": each.row["rows"] + earlier,
    }
    return EvaluationSummary(raised=(alerts.raise_alert(call, monitor, drift, facts),))


def _write_down(call: Call, each: PositionProgress) -> None:
    row = each.row
    place = row["monitor"], row["version"]
    if not each.judged:
        store.set_position(call.tx, *place, due_at=call.now + UNREADABLE)
        return
    last = each.judged[-1]
    own = [] if each.own is None else [sketch.name for sketch in each.own.features]
    store.set_position(
        call.tx,
        *place,
        judged_seq=last.last_seq,
        judged_until=last.drift.until,
        verdict=last.drift.verdict,
        windows=row["windows"] + len(each.judged),
        rows=row["rows"] + sum(judged.rows for judged in each.judged),
        own_columns=own,
        own_reference=each.sealed_own,
        report=last.drift.model_dump(mode="json"),
    )
    window = MonitorWindow.model_validate(row["window"])
    store.refresh_waiting(call.tx, *place, endpoint=row["endpoint"], window=window)


def _monitor(tx: Transaction, ident: str) -> StoredObject:
    found = objects.ever(tx, ident)
    if found is None:
        raise Damaged(f"monitor {ident} has lost its object")
    return found
