"""Detect drift in a window of a model, by column and within a budget of false alarms.

Holm's procedure divides the level of a window among the columns; within a column each of the two tests gets half.
A significant difference counts only from a small effect size: with millions of rows every difference is significant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from falaj.monitoring.drift.comparison import TESTS_PER_COLUMN, ColumnComparison, Test, compare
from falaj.monitoring.drift.dependence import excess_of, spread_within
from falaj.records.monitoring.sketches import (
    BlockSpread,
    ColumnRole,
    DriftReport,
    DriftVerdict,
    Evidence,
    FalseAlarmBudget,
    FeatureSketch,
    ModelDrift,
    ReferenceSketch,
    RowDependence,
    Statistic,
    WindowSketch,
)

EFFECT_FLOOR = 0.2
"""Cohen's "small" effect: a normal variable shifted by 0.2 standard deviations; a PSI of 0.04 or a KS of 0.08
beyond chance. The two distributions share 92 % of their mass. A convention for all data, not fitted to any."""
UNJUDGED_FLOOR = 0.5
"""Cohen's "medium" effect, which counts where the dependence of rows cannot be judged."""

UNJUDGED = "how rows depend on each other cannot be judged, so that only a medium effect counts"
TAKEN_AS_INDEPENDENT = "its rows are taken as independent"

_NAMES = {Statistic.PSI: "PSI", Statistic.KS: "KS", Statistic.CHI_SQUARE: "χ²"}
VERDICT_ORDER = {DriftVerdict.DRIFT: 0, DriftVerdict.NONE: 1, DriftVerdict.TOO_FEW: 2}


def detect_drift(
    reference: ReferenceSketch,
    window: WindowSketch,
    *,
    budget: FalseAlarmBudget | None = None,
    parts: Sequence[WindowSketch] = (),
) -> ModelDrift:
    """Return the drift of every column of `window` from `reference`, largest first.

    `parts` are the windows that `window` was merged from; how they differ shows how rows depend on each other.
    """
    budget = budget or FalseAlarmBudget()
    before = {(sketch.role, sketch.name): sketch for sketch in reference.features}
    now = {(sketch.role, sketch.name): sketch for sketch in window.features}
    slices = _slices(parts)
    duration = window.until - window.since
    compared = [
        _compare(before[key], now[key], reference.spreads, slices.get(key, ()), duration, budget)
        for key in now
        if key in before
    ]
    unjudged = [each.comparison for each in compared if each.comparison.too_few]
    reports = [*_tested(compared, level=budget.per_look), *map(_too_few, unjudged)]
    reports += [not_evaluated(now[key], "it is not in the training set") for key in now if key not in before]
    reports += [not_evaluated(before[key], "it is not in the window") for key in before if key not in now]
    reports.sort(key=lambda report: (VERDICT_ORDER[report.verdict], -report.effect, report.role, report.name))
    verdict = _overall(reports)
    return ModelDrift(
        model=window.model,
        training_set=reference.training_set,
        since=window.since,
        until=window.until,
        budget=budget,
        verdict=verdict,
        reports=tuple(reports),
        words=_summary(window.model, verdict, reports),
    )


def _slices(parts: Sequence[WindowSketch]) -> dict[tuple[ColumnRole, str], list[FeatureSketch]]:
    found: dict[tuple[ColumnRole, str], list[FeatureSketch]] = {}
    for part in parts:
        for sketch in part.features:
            found.setdefault((sketch.role, sketch.name), []).append(sketch)
    return found


def _compare(
    before: FeatureSketch,
    now: FeatureSketch,
    known: Mapping[str, Sequence[BlockSpread]],
    slices: Sequence[FeatureSketch],
    duration: timedelta,
    budget: FalseAlarmBudget,
) -> JudgedColumn:
    """Compare a column with what is known of the dependence of its rows."""
    if budget.dependence is RowDependence.NONE:
        return JudgedColumn(compare(before, now), floor=EFFECT_FLOOR, dependence=TAKEN_AS_INDEPENDENT)
    spreads = known.get(before.name, ())
    alike = [each for each in slices if each.kind is before.kind]
    within = spread_within(before, alike) if before.kind is now.kind else None
    comparison = compare(before, now, excess_of(spreads, duration, within=within))
    if not spreads:
        return JudgedColumn(comparison, floor=UNJUDGED_FLOOR, dependence=UNJUDGED)
    rows, effective = comparison.window.rows, comparison.effective_rows
    vary = f"its {rows} rows vary like {effective} independent ones"
    return JudgedColumn(comparison, floor=EFFECT_FLOOR, dependence=vary)


@dataclass(frozen=True)
class JudgedColumn:
    """The comparison of a column, the effect from which it counts, and what is known of the dependence of its rows."""

    comparison: ColumnComparison
    floor: float
    dependence: str

    @property
    def p_value(self) -> float:
        return self.comparison.p_value


def _tested(compared: Sequence[JudgedColumn], *, level: float) -> list[DriftReport]:
    """Holm: compare the smallest p-value with level/F, the next with level/(F-1), until one fails."""
    ranked = sorted((c for c in compared if c.comparison.tests), key=lambda column: column.p_value)
    reports, failed_at = [], None
    for rank, column in enumerate(ranked):
        own_level = failed_at or level / (len(ranked) - rank)
        if column.p_value > own_level:
            failed_at = own_level
        reports.append(_report(column, level=own_level, open_to_alarm=failed_at is None))
    return reports


def _report(column: JudgedColumn, *, level: float, open_to_alarm: bool) -> DriftReport:
    each, comparison = level / TESTS_PER_COLUMN, column.comparison
    evidence = tuple(_evidence(test, each) for test in comparison.tests)
    significant = [test.effect for test in comparison.tests if test.p_value <= each] if open_to_alarm else []
    effect = max(significant, default=0.0) or max(item.effect for item in evidence)
    verdict = DriftVerdict.DRIFT if max(significant, default=0.0) >= column.floor else DriftVerdict.NONE
    is_judged = column.floor == EFFECT_FLOOR
    finding = _finding(
        comparison.window.name, verdict, evidence, significant=bool(significant), floor=column.floor
    )
    return DriftReport(
        name=comparison.window.name,
        role=comparison.window.role,
        kind=comparison.window.kind,
        verdict=verdict,
        effect=effect,
        level=level,
        window_rows=comparison.window.rows,
        effective_rows=comparison.effective_rows if is_judged else None,
        reference_rows=comparison.reference.rows,
        evidence=evidence,
        words=f"{finding}; {column.dependence}",
    )


def _evidence(test: Test, level: float) -> Evidence:
    return Evidence(
        statistic=test.statistic,
        value=test.value,
        threshold=test.threshold(level),
        p_value=test.p_value,
        effect=test.effect,
        method=test.method(level),
    )


def _finding(
    name: str, verdict: DriftVerdict, evidence: Sequence[Evidence], *, significant: bool, floor: float
) -> str:
    figures = ", ".join(
        f"{_NAMES[item.statistic]} {item.value:.3g} (threshold {item.threshold:.3g})" for item in evidence
    )
    if verdict is DriftVerdict.DRIFT:
        finding = f"{name} drifts"
    elif significant:
        size = "small" if floor == EFFECT_FLOOR else "medium"
        finding = f"{name} differs by less than a {size} effect, which raises no alarm"
    else:
        finding = f"{name} shows no drift"
    psi = next((item.value for item in evidence if item.statistic is Statistic.PSI), None)
    custom = "" if psi is None else f"; by convention this PSI is {conventional_psi_class(psi)}"
    return f"{finding}: {figures}{custom}"


def conventional_psi_class(psi: float) -> str:
    """Classify by the customary limits 0.1 and 0.25, which ignore sample sizes; verdicts do not use it."""
    return "stable" if psi < 0.1 else "moderate" if psi <= 0.25 else "large"


def _too_few(comparison: ColumnComparison) -> DriftReport:
    report = not_evaluated(comparison.window, comparison.too_few)
    return report.model_copy(
        update={"reference_rows": comparison.reference.rows, "window_rows": comparison.window.rows}
    )


def not_evaluated(sketch: FeatureSketch, problem: str, *, window_rows: int = 0) -> DriftReport:
    """Return the report of a column that could not be compared."""
    return DriftReport(
        name=sketch.name,
        role=sketch.role,
        kind=sketch.kind,
        verdict=DriftVerdict.TOO_FEW,
        window_rows=window_rows,
        reference_rows=0,
        words=f"{sketch.name} was not evaluated: {problem}",
    )


def _overall(reports: Sequence[DriftReport]) -> DriftVerdict:
    found = {report.verdict for report in reports}
    if DriftVerdict.DRIFT in found:
        return DriftVerdict.DRIFT
    return DriftVerdict.NONE if DriftVerdict.NONE in found else DriftVerdict.TOO_FEW


def _summary(model: str, verdict: DriftVerdict, reports: Sequence[DriftReport]) -> str:
    subject = model if "@" in model else f"version {model}"  # endpoints send the number alone
    judged = [report for report in reports if report.verdict is not DriftVerdict.TOO_FEW]
    if verdict is DriftVerdict.TOO_FEW:
        return f"{subject}: too few rows to evaluate any of {len(reports)} columns"
    if verdict is DriftVerdict.NONE:
        return f"{subject}: no drift in {len(judged)} columns"
    drifted = [report.name for report in judged if report.verdict is DriftVerdict.DRIFT]
    shown = ", ".join(drifted[:5]) + (f" and {len(drifted) - 5} more" if len(drifted) > 5 else "")
    return f"{subject}: {len(drifted)} of {len(judged)} columns drift: {shown}"
