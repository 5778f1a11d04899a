"""Compare a window with its baseline: the pinned training set, and the version's own reference.

A column is compared with the column of the same name in the training set. A column that the training set does not
have, usually a prediction, is compared with the first rows that the version served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from falaj.monitoring.drift.bins import BINS, MIN_EXPECTED_ROWS
from falaj.monitoring.drift.verdicts import detect_drift, not_evaluated
from falaj.monitoring.sketches.reading import read_points
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

OWN_ROWS = BINS * MIN_EXPECTED_ROWS
"""Minimum rows of a version's own reference: enough for every bin."""
BOOLEANS = ("false", "true")

Key = tuple[ColumnRole, str]


@dataclass(frozen=True)
class DriftBaseline:
    """The references of windows. `chosen` are the watched features; None: all."""

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
class _ComparableColumns:
    """The columns of a window, grouped by their reference."""

    before: list[FeatureSketch] = field(default_factory=list)
    now: list[FeatureSketch] = field(default_factory=list)
    own: dict[Key, int] = field(default_factory=dict)
    skipped: list[DriftReport] = field(default_factory=list)


def compare_with_baseline(
    window: WindowSketch, baseline: DriftBaseline, *, parts: Sequence[WindowSketch] = ()
) -> ModelDrift:
    """Return the drift of every watched column of `window`, which was merged from `parts`."""
    columns = _group_columns(window, baseline)
    before = ReferenceSketch(
        training_set=baseline.pinned.training_set,
        features=(*columns.before, *_absent(window, baseline)),
        spreads=baseline.pinned.spreads,
    )
    now = window.model_copy(update={"features": tuple(columns.now)})
    drift = detect_drift(before, now, budget=baseline.budget, parts=parts)
    reports = [_with_reference(report, columns.own) for report in drift.reports]
    return drift.model_copy(update={"reports": (*reports, *columns.skipped)})


def extend_own_reference(window: WindowSketch, baseline: DriftBaseline) -> ReferenceSketch:
    """Return the version's own reference, extended by `window` for columns with too few rows."""
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
    """Merge windows; of a column that changed its kind, only the last kind is kept."""
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


def _group_columns(window: WindowSketch, baseline: DriftBaseline) -> _ComparableColumns:
    training, learned, columns = baseline.training, baseline.learned, _ComparableColumns()
    for sketch in window.features:
        if not baseline.watches(sketch):
            continue
        before = training.get(sketch.name)
        if before is None:
            before = learned.get((sketch.role, sketch.name))
            if before is None or before.rows < OWN_ROWS:
                columns.skipped.append(not_evaluated(sketch, _LEARNING, window_rows=sketch.rows))
                continue
            columns.own[sketch.role, sketch.name] = before.rows
        now = _as_kind(sketch, before)
        if now is None:
            problem = f"its kind changed from {before.kind} to {sketch.kind}"
            columns.skipped.append(not_evaluated(sketch, problem, window_rows=sketch.rows))
            continue
        columns.before.append(before.model_copy(update={"role": sketch.role}))
        columns.now.append(now)
    return columns


_LEARNING = (
    f"it is not in the training set, so at least the first {OWN_ROWS} served rows become its reference"
)


def _absent(window: WindowSketch, baseline: DriftBaseline) -> list[FeatureSketch]:
    """Return the chosen columns that the endpoint does not see."""
    seen = {sketch.name for sketch in window.features}
    return [each for name, each in baseline.training.items() if baseline.chosen and name not in seen]


def _as_kind(sketch: FeatureSketch, before: FeatureSketch) -> FeatureSketch | None:
    """Convert `sketch` to the kind of its reference; models often see booleans as 0 and 1."""
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


def _with_reference(report: DriftReport, own: dict[Key, int]) -> DriftReport:
    rows = own.get((report.role, report.name))
    if rows is None or report.verdict is DriftVerdict.TOO_FEW:
        return report
    compared = f"compared with its own first {rows} rows, because it is not in the training set"
    return report.model_copy(update={"words": f"{report.words} ({compared})"})
