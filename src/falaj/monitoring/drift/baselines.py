"""One look at one window: each column beside its reference, and what the reader must know of that reference.

A column of the window is compared with the column of the training set that has its name. One that the training set
does not hold, mostly a prediction, is compared with the first rows that the version itself answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from falaj.monitoring.drift.bins import BINS, ENOUGH
from falaj.monitoring.drift.verdicts import detect_drift
from falaj.monitoring.sketches.kll import read_points
from falaj.monitoring.sketches.sketchers import merge, merge_windows
from falaj.records.monitoring.sketches import (
    ColumnKind,
    ColumnRole,
    DriftReport,
    DriftVerdict,
    FalseAlarmBudget,
    FeatureSketch,
    ModelDrift,
    ReferenceSketch,
    WindowSketch,
)

OWN_ROWS = BINS * ENOUGH
"""Rows that a reference of a version's own has at least: enough for every bin."""
BOOLEANS = ("false", "true")

Key = tuple[ColumnRole, str]


@dataclass(frozen=True)
class DriftBaseline:
    """What windows are compared with. `chosen` are the features to look at; none: all that are known."""

    pinned: ReferenceSketch
    own: ReferenceSketch
    chosen: frozenset[str] | None
    budget: FalseAlarmBudget

    @property
    def training(self) -> dict[str, FeatureSketch]:
        return {sketch.name: sketch for sketch in self.pinned.features}

    @property
    def learned(self) -> dict[Key, FeatureSketch]:
        return {(sketch.role, sketch.name): sketch for sketch in self.own.features}

    def watches(self, sketch: FeatureSketch) -> bool:
        return self.chosen is None or sketch.role is ColumnRole.PREDICTION or sketch.name in self.chosen


@dataclass
class _Sorted:
    """The columns of a window, by what they can be compared with."""

    before: list[FeatureSketch] = field(default_factory=list)
    now: list[FeatureSketch] = field(default_factory=list)
    own: dict[Key, int] = field(default_factory=dict)
    beside: list[DriftReport] = field(default_factory=list)


def compare_with_baseline(window: WindowSketch, baseline: DriftBaseline) -> ModelDrift:
    """What became of every watched column of `window`."""
    columns = _sort(window, baseline)
    before = ReferenceSketch(
        training_set=baseline.pinned.training_set,
        features=(*columns.before, *_absent(window, baseline)),
    )
    now = window.model_copy(update={"features": tuple(columns.now)})
    drift = detect_drift(before, now, budget=baseline.budget)
    reports = [_said(report, columns.own) for report in drift.reports]
    return drift.model_copy(update={"reports": (*reports, *columns.beside)})


def extend_own_reference(window: WindowSketch, baseline: DriftBaseline) -> ReferenceSketch:
    """The version's own reference, with what `window` adds to columns that have too few rows yet."""
    training, learned = baseline.training, baseline.learned
    for sketch in window.features:
        key = (sketch.role, sketch.name)
        known = learned.get(key)
        if sketch.name in training or not baseline.watches(sketch):
            continue
        if known is None or known.kind is not sketch.kind:
            learned[key] = sketch
        elif known.rows < OWN_ROWS:
            learned[key] = merge([known, sketch])
    return ReferenceSketch(training_set=baseline.own.training_set, features=tuple(learned.values()))


def merge_compatible(windows: Sequence[WindowSketch]) -> WindowSketch:
    """One window of all; of a column that changed its kind on the way, only what came last."""
    kinds = {(each.role, each.name): each.kind for window in windows for each in window.features}
    return merge_windows(
        [
            window.model_copy(
                update={
                    "features": tuple(
                        each for each in window.features if kinds[each.role, each.name] is each.kind
                    )
                }
            )
            for window in windows
        ]
    )


def _sort(window: WindowSketch, baseline: DriftBaseline) -> _Sorted:
    training, learned, columns = baseline.training, baseline.learned, _Sorted()
    for sketch in window.features:
        if not baseline.watches(sketch):
            continue
        before = training.get(sketch.name)
        if before is None:
            before = learned.get((sketch.role, sketch.name))
            if before is None or before.rows < OWN_ROWS:
                columns.beside.append(_not_judged(sketch, _LEARNING))
                continue
            columns.own[sketch.role, sketch.name] = before.rows
        now = _as_kind(sketch, before)
        if now is None:
            columns.beside.append(_not_judged(sketch, f"it was {before.kind} and is {sketch.kind} now"))
            continue
        columns.before.append(before.model_copy(update={"role": sketch.role}))
        columns.now.append(now)
    return columns


_LEARNING = (
    f"the training set does not hold it, so the first rows served, {OWN_ROWS} at least, become its reference"
)


def _absent(window: WindowSketch, baseline: DriftBaseline) -> list[FeatureSketch]:
    """Columns that were chosen, and that the endpoint does not see."""
    seen = {sketch.name for sketch in window.features}
    return [each for name, each in baseline.training.items() if baseline.chosen and name not in seen]


def _as_kind(sketch: FeatureSketch, before: FeatureSketch) -> FeatureSketch | None:
    """`sketch` as its reference is; models often see booleans as 0 and 1."""
    if sketch.kind is before.kind:
        return sketch
    if before.kind is not ColumnKind.CATEGORICAL or not set(before.categories) <= set(BOOLEANS):
        return None
    points = read_points(sketch)
    if not set(points.values.tolist()) <= {0.0, 1.0}:
        return None
    falses = int((points.cumulated[points.values == 0.0]).max(initial=0))
    counts = {"false": falses, "true": points.count - falses}
    return FeatureSketch(
        name=sketch.name,
        kind=ColumnKind.CATEGORICAL,
        role=sketch.role,
        count=points.count,
        nulls=sketch.nulls,
        categories={name: count for name, count in counts.items() if count},
    )


def _said(report: DriftReport, own: dict[Key, int]) -> DriftReport:
    rows = own.get((report.role, report.name))
    if rows is None or report.verdict is DriftVerdict.TOO_FEW:
        return report
    beside = f"beside its own first {rows} rows, because the training set does not hold it"
    return report.model_copy(update={"words": f"{report.words} ({beside})"})


def _not_judged(sketch: FeatureSketch, problem: str) -> DriftReport:
    return DriftReport(
        name=sketch.name,
        role=sketch.role,
        kind=sketch.kind,
        verdict=DriftVerdict.TOO_FEW,
        window_rows=sketch.rows,
        reference_rows=0,
        words=f"{sketch.name} is not judged: {problem}",
    )
