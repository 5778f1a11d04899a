"""A look on request: what came since the last complete window, or between two moments."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from falaj.governance import objects
from falaj.governance.encryption.values import SealedValues
from falaj.monitoring import store
from falaj.monitoring.drift.baselines import compare_with_baseline
from falaj.monitoring.evaluation import load_baseline, load_window
from falaj.monitoring.sketches.sketch_store import SketchStore
from falaj.monitoring.windows.slots import WindowSlot
from falaj.ports.metadata import Database
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.monitors import MonitorReport
from falaj.records.monitoring.sketches import DriftVerdict, ModelDrift

_ORDER = {DriftVerdict.DRIFT: 0, DriftVerdict.NONE: 1, DriftVerdict.TOO_FEW: 2}


def check(
    database: Database,
    sealed: SealedValues,
    found: StoredObject,
    *,
    since: datetime | None,
    until: datetime | None,
) -> MonitorReport:
    """How the versions of the monitor's endpoint stand; nothing is written down."""
    with database.read() as tx:
        row = store.monitor_row(tx, found.id)
        endpoint = objects.ever(tx, row["endpoint"])
        positions = {each["version"]: each for each in store.positions_of(tx, found.id)}
        slots = store.slots_between(tx, row["endpoint"], since=since, until=until)
    sketches = SketchStore(sealed, endpoint.workspace if endpoint else "")
    looks = []
    for version, position in positions.items():
        chosen = slots.get(version, [])
        if since is None and until is None:
            chosen = [slot for slot in chosen if slot.seq > position["judged_seq"]]
        look = _look(sketches, row, position, chosen)
        if since is None and until is None:
            look = _or_last(look, position)
        looks += [] if look is None else [look]
    return _report(found, row, looks)


def _look(
    sketches: SketchStore, row: dict[str, Any], position: dict[str, Any], slots: list[WindowSlot]
) -> ModelDrift | None:
    if not slots:
        return None
    version, own = position["version"], position["own_reference"]
    baseline = load_baseline(sketches, row, ident=row["id"], version=version, own=own)
    return compare_with_baseline(
        load_window(sketches, slots, endpoint=row["endpoint"], version=version), baseline
    )


def _or_last(look: ModelDrift | None, position: dict[str, Any]) -> ModelDrift | None:
    """The last complete window where too little came since it."""
    if position["report"] is None or (look is not None and look.verdict is not DriftVerdict.TOO_FEW):
        return look
    return ModelDrift.model_validate(position["report"])


def _report(found: StoredObject, row: dict[str, Any], looks: list[ModelDrift]) -> MonitorReport:
    looks.sort(key=lambda look: (_ORDER[look.verdict], look.model))
    words = "; ".join(look.words for look in looks) or "nothing was handed in for this time"
    return MonitorReport(
        monitor=found.id,
        name=found.name,
        endpoint=row["endpoint"],
        verdict=looks[0].verdict if looks else DriftVerdict.TOO_FEW,
        looks=tuple(looks),
        words=words,
    )
