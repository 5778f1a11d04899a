"""Accept or reject a variant, with the reason. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from falaj.records.optimization import AcceptanceBudget, Interval, OptimizationVerdict

METRICS = {"log_loss": "log loss", "rmse": "RMSE"}


def decide_acceptance(
    speedup: Mapping[str, Interval], worse: Interval, *, budget: AcceptanceBudget, metric: str
) -> tuple[OptimizationVerdict, str]:
    """Accept a variant if its loss is within the budget, and it is faster at some batch size and slower at none.

    Each condition must hold for the whole confidence interval. Slower means by the speedup that the budget asks for.
    """
    loss = METRICS[metric]
    if worse.high > budget.worse:
        return OptimizationVerdict.REFUSED, (
            f"its {loss} may be {worse.high:.2%} above the original's "
            f"(measured {_share(worse.middle)}); the budget is {budget.worse:.2%}"
        )
    slower = [_shown(name, each) for name, each in speedup.items() if each.high < 1 / budget.speedup]
    if slower:
        return OptimizationVerdict.REFUSED, f"it is slower than the original: {', '.join(slower)}"
    faster = [_shown(name, each) for name, each in speedup.items() if each.low >= budget.speedup]
    if not faster:
        name, best = max(speedup.items(), key=lambda item: item[1].low)
        return OptimizationVerdict.REFUSED, (
            f"it is not {budget.speedup:g} times as fast as the original with confidence; at best {_shown(name, best)}"
        )
    loses = f"{loss} {_share(worse.middle)}, at most {_share(worse.high)}"
    return OptimizationVerdict.ACCEPTED, f"faster: {', '.join(faster)}; {loses}"


def _share(value: float) -> str:
    return f"{round(value, 4) + 0.0:+.2%}"  # never -0.00%


def _shown(name: str, times: Interval) -> str:
    return f"{name} {times.middle:.2f}× ({times.low:.2f} to {times.high:.2f})"
