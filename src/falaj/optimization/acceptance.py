"""Accept or reject a variant, with the reason. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from falaj.records.optimization import (
    HIGHER_IS_BETTER,
    AcceptanceBudget,
    Interval,
    OptimizationVerdict,
    QualityMetric,
)

METRICS: dict[QualityMetric, str] = {
    "auc": "AUC",
    "accuracy": "accuracy",
    "log_loss": "log loss",
    "rmse": "RMSE",
}


def decide_acceptance(
    speedup: Mapping[str, Interval],
    worse: Interval,
    *,
    budget: AcceptanceBudget,
    metric: QualityMetric,
    noise: Mapping[str, Interval] | None = None,
    than: str = "the original",
    served: Collection[str] | None = None,
) -> tuple[OptimizationVerdict, str]:
    """Accept a variant if its quality is within the budget, it is faster at some batch size, and slower at none of
    those that count as `served`; by default all.

    Each condition must hold for the whole confidence interval, and beyond the noise: the speedup that a second copy of
    the original seems to have by chance. `than` names what the speedup is measured against.
    """
    chance = {name: _beyond((noise or {}).get(name)) for name in speedup}
    if worse.high > budget.worse:
        return OptimizationVerdict.REFUSED, (
            f"its {METRICS[metric]} may be {_amount(worse.high, budget)} {_side(metric)} the original's "
            f"(measured {_change(worse.middle, budget, metric)}); the budget is {_amount(budget.worse, budget)}"
        )
    slower = [
        _shown(name, each)
        for name, each in speedup.items()
        if (served is None or name in served) and each.high < 1 / chance[name]
    ]
    if slower:
        return OptimizationVerdict.REFUSED, f"it is slower than {than}: {', '.join(slower)}"
    faster = [
        _shown(name, each) for name, each in speedup.items() if each.low >= max(budget.speedup, chance[name])
    ]
    if not faster:
        name, best = max(speedup.items(), key=lambda item: item[1].low)
        return OptimizationVerdict.REFUSED, (
            f"it is not {max(budget.speedup, chance[name]):.3g} times as fast as {than} with confidence; at best "
            f"{_shown(name, best)}"
        )
    loses = f"{METRICS[metric]} {_change(worse.middle, budget, metric)}, at worst {_change(worse.high, budget, metric)}"
    return OptimizationVerdict.ACCEPTED, f"faster than {than}: {', '.join(faster)}; {loses}"


def _beyond(noise: Interval | None) -> float:
    """Return the largest factor, at least 1, by which two copies of the original differ."""
    return 1.0 if noise is None or noise.low <= 0 else max(1.0, noise.high, 1 / noise.low)


def _side(metric: QualityMetric) -> str:
    return "below" if metric in HIGHER_IS_BETTER else "above"


def _amount(value: float, budget: AcceptanceBudget) -> str:
    return f"{value:.2%}" if budget.relative else f"{value:.4g}"


def _change(worse: float, budget: AcceptanceBudget, metric: QualityMetric) -> str:
    """Return the change of the metric itself: a worse AUC is a lower one."""
    value = -worse if metric in HIGHER_IS_BETTER else worse
    rounded = round(value, 4 if budget.relative else 6) + 0.0  # never -0.00%
    return f"{rounded:+.2%}" if budget.relative else f"{rounded:+.4g}"


def _shown(name: str, times: Interval) -> str:
    return f"{name} {times.middle:.2f}× ({times.low:.2f} to {times.high:.2f})"
