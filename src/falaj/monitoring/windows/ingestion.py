"""Take in the windows that servers hand in: checked, sealed, numbered in the order of arrival; old ones merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from falaj.errors import Damaged, InvalidInput
from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.monitoring import store
from falaj.monitoring.drift.baselines import merge_compatible
from falaj.monitoring.sketches.kll import read_points
from falaj.monitoring.sketches.sketch_store import SketchStore
from falaj.monitoring.windows.slots import WindowSlot, pair_to_merge
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.monitors import MonitorWindow, WindowReceipt, WindowRecord
from falaj.records.monitoring.sketches import ColumnKind, WindowSketch

Watching = list[tuple[str, MonitorWindow]]


def ingest_windows(
    gate: Gate, call: Call, sealed: SealedValues, windows: Sequence[WindowRecord]
) -> WindowReceipt:
    """Store the windows of the endpoint that the call acts on, if a monitor watches it."""
    for number, window in enumerate(windows):
        _check(window, f"windows.{number}")
    endpoint, sketches = call.target, SketchStore(sealed, call.target.workspace)
    watching = store.monitors_of(call.tx, endpoint.id)
    if watching:
        _require_placed(gate, call)
    last = store.lock_endpoint(call.tx, endpoint.id, take=len(windows)) if watching else None
    if last is None:
        return WindowReceipt(endpoint=endpoint.id, stored=0, monitors=0)
    first = last - len(windows) + 1
    for seq, window in enumerate(windows, first):
        slot = WindowSlot(
            seq, window.since, window.until, window.rows, _sealed(sketches, window, endpoint, seq)
        )
        store.add_slot(call.tx, endpoint.id, window.model, slot)
    for version, added in Counter(window.model for window in windows).items():
        _make_known(call, watching, version, before=first - 1)
        for _ in range(added):
            compact(call, sketches, version, watching)
    return WindowReceipt(endpoint=endpoint.id, stored=len(windows), monitors=len(watching))


def compact(call: Call, sketches: SketchStore, version: str, watching: Watching) -> None:
    """Merge the two slots of a version that matter least, if it has too many."""
    tx, endpoint = call.tx, call.target.id
    slots = store.slot_facts(tx, endpoint, version)
    judged = store.judged_seqs(tx, [monitor for monitor, _ in watching], version)
    pair = pair_to_merge(slots, boundaries=judged)
    if pair is None:
        return
    opened = [
        sketches.open_window(
            store.sealed_slot(tx, endpoint, version, slot.seq),
            endpoint=endpoint,
            version=version,
            seq=slot.seq,
        )
        for slot in pair
    ]
    both, seq = merge_compatible(opened), pair[1].seq
    sealed = sketches.seal_window(both, endpoint=endpoint, seq=seq)
    rows = pair[0].rows + pair[1].rows
    store.replace_pair(tx, endpoint, version, pair, WindowSlot(seq, both.since, both.until, rows, sealed))


def _make_known(call: Call, watching: Watching, version: str, *, before: int) -> None:
    for monitor, window in watching:
        store.begin_position(call.tx, monitor, version, before=before)
        store.refresh_waiting(call.tx, monitor, version, endpoint=call.target.id, window=window)


def _sealed(sketches: SketchStore, window: WindowRecord, endpoint: StoredObject, seq: int) -> bytes:
    plain = WindowSketch.model_construct(
        model=window.model, since=window.since, until=window.until, features=window.features
    )
    return sketches.seal_window(plain, endpoint=endpoint.id, seq=seq)


def _require_placed(gate: Gate, call: Call) -> None:
    """Sketches lie in the default zone; the endpoint's label may have changed since somebody began to watch it."""
    seen = partial(gate.authorizer.sees, call.tx, call.caller)
    gate.zones.require(call.tx, [call.target], gate.zones.default, seen=seen)


def _check(window: WindowRecord, where: str) -> None:
    """Nothing is stored that cannot be read again."""
    for sketch in window.features:
        if sketch.kind is ColumnKind.NUMERIC:
            try:
                read_points(sketch)
            except Damaged as problem:
                raise InvalidInput.at(
                    f"{where}.features.{sketch.name}",
                    given=problem.message,
                    allowed="the bytes of a sketch that Falaj made",
                ) from None
