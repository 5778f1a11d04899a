"""Detect drift in a window of a model, by column and within a budget of false alarms.

Holm's procedure divides the level of a window among the columns; within a column each of the two tests gets half.
A significant difference counts only from a small effect size: with millions of rows every difference is significant.
"""

from __future__ import annotations

from collections.abc import Sequence

from falaj.monitoring.drift.comparison import TESTS_PER_COLUMN, ColumnComparison, Test, compare
from falaj.records.monitoring.sketches import (
    DriftReport,
    DriftVerdict,
    Evidence,
    FalseAlarmBudget,
    FeatureSketch,
    ModelDrift,
    ReferenceSketch,
    Statistic,
    WindowSketch,
)

EFFECT_FLOOR = 0.2
"""Cohen's "small" effect: a normal variable shifted by 0.2 standard deviations; a PSI of 0.04 or a KS of 0.08
beyond chance. The two distributions share 92 % of their mass. A convention for all data, not fitted to any."""

_NAMES = {Statistic.PSI: "PSI", Statistic.KS: "KS", Statistic.CHI_SQUARE: "χ²"}
VERDICT_ORDER = {DriftVerdict.DRIFT: 0, DriftVerdict.NONE: 1, DriftVerdict.TOO_FEW: 2}


def detect_drift(
    reference: ReferenceSketch, window: WindowSketch, *, budget: FalseAlarmBudget | None = None
) -> ModelDrift:
    """Return the drift of every column of `window` from `reference`, largest first."""
    budget = budget or FalseAlarmBudget()
    before = {(sketch.role, sketch.name): sketch for sketch in reference.features}
    now = {(sketch.role, sketch.name): sketch for sketch in window.features}
    compared = [compare(before[key], now[key]) for key in now if key in before]
    reports = [*_tested(compared, level=budget.per_look), *(_too_few(c) for c in compared if c.too_few)]
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


def _tested(compared: Sequence[ColumnComparison], *, level: float) -> list[DriftReport]:
    """Holm: compare the smallest p-value with level/F, the next with level/(F-1), until one fails."""
    ranked = sorted((c for c in compared if c.tests), key=lambda comparison: comparison.p_value)
    reports, failed_at = [], None
    for rank, comparison in enumerate(ranked):
        own_level = failed_at or level / (len(ranked) - rank)
        if comparison.p_value > own_level:
            failed_at = own_level
        reports.append(_report(comparison, level=own_level, open_to_alarm=failed_at is None))
    return reports


def _report(comparison: ColumnComparison, *, level: float, open_to_alarm: bool) -> DriftReport:
    each = level / TESTS_PER_COLUMN
    evidence = tuple(_evidence(test, each) for test in comparison.tests)
    significant = [test.effect for test in comparison.tests if test.p_value <= each] if open_to_alarm else []
    effect = max(significant, default=0.0) or max(item.effect for item in evidence)
    verdict = DriftVerdict.DRIFT if max(significant, default=0.0) >= EFFECT_FLOOR else DriftVerdict.NONE
    return DriftReport(
        name=comparison.window.name,
        role=comparison.window.role,
        kind=comparison.window.kind,
        verdict=verdict,
        effect=effect,
        level=level,
        window_rows=comparison.window.rows,
        reference_rows=comparison.reference.rows,
        evidence=evidence,
        words=_finding(comparison.window.name, verdict, evidence, significant=bool(significant)),
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


def _finding(name: str, verdict: DriftVerdict, evidence: Sequence[Evidence], *, significant: bool) -> str:
    figures = ", ".join(
        f"{_NAMES[item.statistic]} {item.value:.3g} (threshold {item.threshold:.3g})" for item in evidence
    )
    if verdict is DriftVerdict.DRIFT:
        finding = f"{name} drifts"
    elif significant:
        finding = f"{name} differs by less than a small effect, which raises no alarm"
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
    judged = [report for report in reports if report.verdict is not DriftVerdict.TOO_FEW]
    if verdict is DriftVerdict.TOO_FEW:
        return f"{model}: too few rows to evaluate any of {len(reports)} columns"
    if verdict is DriftVerdict.NONE:
        return f"{model}: no drift in {len(judged)} columns"
    drifted = [report.name for report in judged if report.verdict is DriftVerdict.DRIFT]
    shown = ", ".join(drifted[:5]) + (f" and {len(drifted) - 5} more" if len(drifted) > 5 else "")
    return f"{model}: {len(drifted)} of {len(judged)} columns drift: {shown}"
