"""The drift of a monitor over time, and the distribution of one column before and now."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from falaj.errors import NotFound
from falaj.governance import objects
from falaj.governance.encryption.values import SealedValues
from falaj.monitoring import store
from falaj.monitoring.drift.baselines import DriftBaseline, compare_with_baseline, merge_compatible
from falaj.monitoring.drift.bins import known_to_both
from falaj.monitoring.evaluation import load_baseline, load_slots
from falaj.monitoring.sketches.reading import read_points
from falaj.monitoring.sketches.sketch_store import SketchStore
from falaj.monitoring.windows.slots import WindowSlot, complete_windows
from falaj.ports.metadata import Database
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.monitors import (
    ColumnDistribution,
    ColumnDrift,
    DriftHistory,
    DriftWindow,
    MonitorWindow,
)
from falaj.records.monitoring.sketches import ColumnKind, FeatureSketch, WindowSketch
from falaj.records.quantiles.kll import Floats

CATEGORIES = 20
"""Categories of a distribution; the rest is one bin."""
OTHERS = "others"


class MonitorPast:
    """The windows that are kept of a monitor's endpoint, and what they are compared with; nothing is stored."""

    def __init__(self, database: Database, sealed: SealedValues, found: StoredObject) -> None:
        with database.read() as tx:
            self._row = store.monitor_row(tx, found.id)
            endpoint = objects.ever(tx, self._row["endpoint"])
            self._positions = {each["version"]: each for each in store.positions_of(tx, found.id)}
        self._database = database
        self._monitor = found
        self._sketches = SketchStore(sealed, endpoint.workspace if endpoint else "")

    def history(
        self, *, since: datetime | None, until: datetime | None, now: datetime, most: int
    ) -> DriftHistory:
        """Return the drift of each window of each version, oldest first; neighbours are merged into `most` of them."""
        window = MonitorWindow.model_validate(self._row["window"])
        found = []
        for version, slots in self._slots(since, until).items():
            baseline = self._baseline(version)
            parts = _merged(complete_windows(slots, window, now=now) or [slots], most)
            found += [self._drift(version, baseline, part) for part in parts]
        found.sort(key=lambda each: (each.since, each.version))
        return DriftHistory(monitor=self._monitor.id, name=self._monitor.name, windows=tuple(found))

    def distribution(
        self, column: str, *, version: str | None, since: datetime | None, until: datetime | None, bins: int
    ) -> ColumnDistribution:
        """Return how the values of a column were distributed in the reference, and are in a time."""
        slots = self._slots(since, until)
        named = version or next(iter(sorted(slots, key=lambda each: -slots[each][-1].seq)), None)
        if named is None or named not in slots:
            raise NotFound(f"monitor {self._monitor.name} has no rows of that version in that time")
        parts = self._load(named, slots[named])
        now = _column(merge_compatible(parts), column)
        before = _reference(self._baseline(named), now) if now is not None else None
        if now is None or before is None:
            raise NotFound(f"monitor {self._monitor.name} does not compare a column {column!r} of {named}")
        numeric = now.kind is ColumnKind.NUMERIC and before.kind is ColumnKind.NUMERIC
        facts = _numbers(before, now, bins=bins) if numeric else _categories(before, now)
        return ColumnDistribution(
            column=column,
            version=named,
            since=min(part.since for part in parts),
            until=max(part.until for part in parts),
            kind=ColumnKind.NUMERIC if numeric else ColumnKind.CATEGORICAL,
            nulls=(before.nulls, now.nulls),
            **facts,
        )

    def _slots(self, since: datetime | None, until: datetime | None) -> dict[str, list[WindowSlot]]:
        with self._database.read() as tx:
            found = store.slots_between(tx, self._row["endpoint"], since=since, until=until)
        return {version: slots for version, slots in found.items() if version in self._positions}

    def _baseline(self, version: str) -> DriftBaseline:
        own = self._positions[version]["own_reference"]
        return load_baseline(self._sketches, self._row, ident=self._monitor.id, version=version, own=own)

    def _load(self, version: str, slots: list[WindowSlot]) -> list[WindowSketch]:
        return load_slots(self._sketches, slots, endpoint=self._row["endpoint"], version=version)

    def _drift(self, version: str, baseline: DriftBaseline, slots: list[WindowSlot]) -> DriftWindow:
        parts = self._load(version, slots)
        drift = compare_with_baseline(merge_compatible(parts), baseline, parts=parts)
        columns = (
            ColumnDrift(name=each.name, role=each.role, verdict=each.verdict, effect=each.effect)
            for each in drift.reports
        )
        return DriftWindow(
            version=version,
            since=drift.since,
            until=drift.until,
            rows=sum(slot.rows for slot in slots),
            verdict=drift.verdict,
            columns=tuple(columns),
        )


def _merged(windows: Sequence[list[WindowSlot]], most: int) -> list[list[WindowSlot]]:
    """Return at most so many windows, each of about as many neighbours."""
    count = min(len(windows), most)
    edges = [number * len(windows) // count for number in range(count + 1)] if count else [0]
    return [[slot for window in windows[low:high] for slot in window] for low, high in pairwise(edges)]


def _column(window: WindowSketch, name: str) -> FeatureSketch | None:
    return next((each for each in window.features if each.name == name), None)


def _reference(baseline: DriftBaseline, now: FeatureSketch) -> FeatureSketch | None:
    """Return what a column is compared with; none if it is not watched, or has no reference yet."""
    found = baseline.training.get(now.name) or baseline.learned.get((now.role, now.name))
    return found if baseline.watches(now) else None


def _numbers(before: FeatureSketch, now: FeatureSketch, *, bins: int) -> dict[str, Any]:
    """Return equal bins over nearly all values of both; what lies outside is in the first and last bin."""
    points = [read_points(side) for side in (before, now)]
    some = [each for each in points if each.count]
    if not some:
        return {"edges": (), "before": (), "now": ()}
    low = min(float(each.quantiles(np.array([0.005]))[0]) for each in some)
    high = max(float(each.quantiles(np.array([0.995]))[0]) for each in some)
    if not np.isfinite([low, high]).all():
        low, high = (max(min(value, 1e300), -1e300) for value in (low, high))
    edges: Floats = np.linspace(low, high, bins + 1) if high > low else np.array([low, low + 1.0])
    counts = [
        np.diff(each.at_or_below(edges[1:-1]), prepend=0, append=each.count)
        if each.count
        else np.zeros(len(edges) - 1)
        for each in points
    ]
    return {
        "edges": tuple(float(edge) for edge in edges),
        "before": tuple(float(count) for count in counts[0]),
        "now": tuple(float(count) for count in counts[1]),
    }


def _categories(before: FeatureSketch, now: FeatureSketch) -> dict[str, Any]:
    shown = known_to_both(before, now)[:CATEGORIES]
    sides = [[float(side.categories.get(name, 0)) for name in shown] for side in (before, now)]
    rest = [max(side.count - sum(counts), 0.0) for side, counts in zip((before, now), sides, strict=True)]
    if any(rest):
        shown, sides = [*shown, OTHERS], [[*counts, more] for counts, more in zip(sides, rest, strict=True)]
    return {"categories": tuple(shown), "before": tuple(sides[0]), "now": tuple(sides[1])}
