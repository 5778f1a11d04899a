"""Ingest windows from servers: check, encrypt and number them in order of arrival; merge old ones."""

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
from falaj.monitoring.sketches.reading import read_sketch
from falaj.monitoring.sketches.sketch_store import SketchStore
from falaj.monitoring.windows.slots import WindowSlot, pair_to_merge
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.monitors import MonitorWindow, WindowReceipt, WindowRecord
from falaj.records.monitoring.sketches import ColumnKind, WindowSketch

Monitors = list[tuple[str, MonitorWindow]]


def ingest_windows(
    gate: Gate,
    call: Call,
    endpoint: StoredObject,
    sealed: SealedValues,
    windows: Sequence[WindowRecord],
) -> WindowReceipt:
    """Store the windows of `endpoint`, if a monitor watches it."""
    for number, window in enumerate(windows):
        _check(window, f"windows.{number}")
    sketches = SketchStore(sealed, endpoint.workspace)
    watching = store.monitors_of(call.tx, endpoint.id)
    if watching:
        _require_placed(gate, call, endpoint)
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
        _start_positions(call, endpoint, watching, version, before=first - 1)
        for _ in range(added):
            compact(call.tx, sketches, endpoint.id, version, watching)
    return WindowReceipt(endpoint=endpoint.id, stored=len(windows), monitors=len(watching))


def compact(tx: Transaction, sketches: SketchStore, endpoint: str, version: str, watching: Monitors) -> None:
    """Merge the two least important slots of a version if it has too many."""
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


def _start_positions(
    call: Call, endpoint: StoredObject, watching: Monitors, version: str, *, before: int
) -> None:
    for monitor, window in watching:
        store.begin_position(call.tx, monitor, version, before=before)
        store.refresh_waiting(call.tx, monitor, version, endpoint=endpoint.id, window=window)


def _sealed(sketches: SketchStore, window: WindowRecord, endpoint: StoredObject, seq: int) -> bytes:
    plain = WindowSketch.model_construct(
        model=window.model, since=window.since, until=window.until, features=window.features
    )
    return sketches.seal_window(plain, endpoint=endpoint.id, seq=seq)


def _require_placed(gate: Gate, call: Call, endpoint: StoredObject) -> None:
    """Raise unless sketches of the endpoint may lie in the default zone; its label may have changed."""
    seen = partial(gate.authorizer.sees, call.tx, call.caller)
    gate.zones.require(call.tx, [endpoint], gate.zones.default, seen=seen)


def _check(window: WindowRecord, where: str) -> None:
    """Raise InvalidInput if a sketch cannot be parsed."""
    for sketch in window.features:
        if sketch.kind is ColumnKind.NUMERIC:
            try:
                read_sketch(sketch)
            except Damaged as problem:
                raise InvalidInput.at(
                    f"{where}.features.{sketch.name}",
                    given=problem.message,
                    allowed="the bytes of a KLL sketch written by Falaj",
                ) from None
