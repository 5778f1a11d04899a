"""The budget of an optimization in words, such as "auc -0.002" or "log_loss +1%"."""

from __future__ import annotations

import re
from typing import get_args

from falaj.errors import InvalidInput
from falaj.records.optimization import HIGHER_IS_BETTER, AcceptanceBudget, QualityMetric

EXAMPLES = '"auc -0.002", "accuracy -0.5%", "log_loss +1%" or "rmse +0.1"'
SPELLED = re.compile(
    r"\s*([A-Za-z][A-Za-z0-9_ ]*?)\s*([+-]|\s)\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(%?)\s*"
)
MOST = 10.0


def parse_budget(text: str, *, speedup: float | None = None) -> AcceptanceBudget:
    """Return the budget that `text` spells. Raise InvalidInput that says what is wrong with it.

    A number is a difference of the metric; with % it is a share of the original's value.
    """
    found = SPELLED.fullmatch(text)
    if found is None:
        raise _invalid(text, "a metric, a sign and a number")
    name, sign, number, percent = found.groups()
    metric = _metric(text, name)
    expected = "-" if metric in HIGHER_IS_BETTER else "+"
    if sign != expected:
        better = "higher" if metric in HIGHER_IS_BETTER else "lower"
        raise InvalidInput.at(
            "budget",
            given=text,
            allowed=f"how much worse {metric} may become; {better} is better, so the sign is {expected}",
            fix=f'"{metric} {expected}{number}{percent}"',
        )
    worse = float(number) / (100 if percent else 1)
    if worse > MOST:
        raise _invalid(text, f"at most {MOST:g}")
    faster = {} if speedup is None else {"speedup": speedup}
    return AcceptanceBudget(metric=metric, worse=worse, relative=bool(percent), **faster)


def format_budget(budget: AcceptanceBudget) -> str:
    """Return the quality part of a budget as `parse_budget` takes it."""
    limit = f"{budget.worse * 100:g}%" if budget.relative else f"{budget.worse:g}"
    if budget.metric is None:
        return f"log_loss or rmse +{limit}"
    return f"{budget.metric} {'-' if budget.metric in HIGHER_IS_BETTER else '+'}{limit}"


def _metric(text: str, name: str) -> QualityMetric:
    wanted = name.strip().lower().replace(" ", "_")
    for metric in get_args(QualityMetric):
        if metric == wanted:
            return metric  # type: ignore[no-any-return]
    raise _invalid(text, f"one of the metrics {', '.join(get_args(QualityMetric))}")


def _invalid(text: str, allowed: str) -> InvalidInput:
    return InvalidInput.at("budget", given=text, allowed=allowed, fix=f"write it like {EXAMPLES}")
