"""Drift reports on request: since the last complete window, or between two times."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from falaj.governance import objects
from falaj.governance.encryption.values import SealedValues
from falaj.monitoring import store
from falaj.monitoring.drift.baselines import compare_with_baseline, merge_compatible
from falaj.monitoring.drift.verdicts import VERDICT_ORDER
from falaj.monitoring.evaluation import load_baseline, load_slots
from falaj.monitoring.sketches.sketch_store import SketchStore
from falaj.monitoring.windows.slots import WindowSlot
from falaj.ports.metadata import Database
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.monitors import MonitorReport
from falaj.records.monitoring.sketches import DriftVerdict, ModelDrift


def check(
    database: Database,
    sealed: SealedValues,
    found: StoredObject,
    *,
    since: datetime | None,
    until: datetime | None,
) -> MonitorReport:
    """Report the drift of each version of the monitor's endpoint; nothing is stored."""
    with database.read() as tx:
        row = store.monitor_row(tx, found.id)
        endpoint = objects.ever(tx, row["endpoint"])
        positions = {each["version"]: each for each in store.positions_of(tx, found.id)}
        slots = store.slots_between(tx, row["endpoint"], since=since, until=until)
    sketches = SketchStore(sealed, endpoint.workspace if endpoint else "")
    drifts = []
    for version, position in positions.items():
        chosen = slots.get(version, [])
        if since is None and until is None:
            chosen = [slot for slot in chosen if slot.seq > position["judged_seq"]]
        drift = _drift_of(sketches, row, position, chosen)
        if since is None and until is None:
            drift = _or_last(drift, position)
        drifts += [] if drift is None else [drift]
    return _report(found, row, drifts)


def _drift_of(
    sketches: SketchStore, row: dict[str, Any], position: dict[str, Any], slots: list[WindowSlot]
) -> ModelDrift | None:
    if not slots:
        return None
    version, own = position["version"], position["own_reference"]
    baseline = load_baseline(sketches, row, ident=row["id"], version=version, own=own)
    parts = load_slots(sketches, slots, endpoint=row["endpoint"], version=version)
    return compare_with_baseline(merge_compatible(parts), baseline, parts=parts)


def _or_last(drift: ModelDrift | None, position: dict[str, Any]) -> ModelDrift | None:
    """Return the report of the last complete window if `drift` has too few rows."""
    if position["report"] is None or (drift is not None and drift.verdict is not DriftVerdict.TOO_FEW):
        return drift
    return ModelDrift.model_validate(position["report"])


def _report(found: StoredObject, row: dict[str, Any], drifts: list[ModelDrift]) -> MonitorReport:
    drifts.sort(key=lambda drift: (VERDICT_ORDER[drift.verdict], drift.model))
    words = "; ".join(drift.words for drift in drifts) or "no windows were received for this time"
    return MonitorReport(
        monitor=found.id,
        name=found.name,
        endpoint=row["endpoint"],
        verdict=drifts[0].verdict if drifts else DriftVerdict.TOO_FEW,
        looks=tuple(drifts),
        words=words,
    )
