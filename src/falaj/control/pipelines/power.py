"""How soon a canary decides, computed before it begins: by margin, share, traffic and the champion's figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from falaj.control.pipelines.betting import (
    MOST_VALUES,
    Margin,
    log_growth,
    log_mean,
    payoffs,
)
from falaj.control.pipelines.verdict import LOG_LOSS_BOUND, judged_metrics, squared_error_bound, thresholds
from falaj.records.control.pipelines import (
    Canary,
    CanaryForecast,
    CanaryOutcome,
    CanaryPlan,
    CanaryTraffic,
    Metric,
)
from falaj.records.serving.endpoints import ScoringRule
from falaj.records.serving.statistics import VersionStats

if TYPE_CHECKING:
    from falaj.control.pipelines.betting import Floats


TYPICAL = CanaryTraffic(labelled=1.0, error_rate=0.01, slow_share=0.05, score_mean=0.5, score_variance=0.25)
"""What is assumed where nothing is known; the score is that of a classifier of moderate quality."""


def seen_traffic(stats: VersionStats | None, *, requests_per_hour: float | None) -> CanaryTraffic:
    """Return what the champion's statistics tell."""
    if stats is None or not stats.requests:
        return CanaryTraffic()
    return CanaryTraffic(
        requests_per_hour=requests_per_hour or None,
        labelled=min(stats.labelled / stats.rows, 1.0) if stats.rows and stats.labelled else None,
        error_rate=stats.errors / stats.requests,
        slow_share=stats.slow_share,
        score_mean=stats.score_mean or None,
        score_variance=stats.score_variance,
    )


def plan_canary(
    endpoint: str,
    plan: Canary,
    *,
    given: CanaryTraffic,
    seen: CanaryTraffic,
    scoring: ScoringRule | None,
    worse: Sequence[float],
) -> CanaryPlan:
    """Return how soon a canary decides on challengers that are worse by so many times the margin of each metric."""
    known = {**seen.model_dump(exclude_none=True), **given.model_dump(exclude_none=True)}
    assumed = {
        name: figure for name, figure in TYPICAL.model_dump(exclude_none=True).items() if name not in known
    }
    traffic = CanaryTraffic.model_validate({**known, **assumed})
    forecasts = forecast_canary(plan, traffic, scoring=scoring or ScoringRule.LOG_LOSS, worse=worse)
    return CanaryPlan(
        endpoint=endpoint, canary=plan, traffic=traffic, assumed=tuple(assumed), forecasts=tuple(forecasts)
    )


def forecast_canary(
    plan: Canary,
    traffic: CanaryTraffic,
    *,
    scoring: ScoringRule = ScoringRule.LOG_LOSS,
    worse: Sequence[float],
) -> list[CanaryForecast]:
    """Return the forecasts of each metric, for challengers that are worse by so many times its margin."""
    figures = _Figures.of(traffic, scoring)
    return [
        _forecast(plan, figures, metric, margin, times)
        for metric, margin in judged_metrics(plan).items()
        for times in worse
    ]


@dataclass(frozen=True)
class _Figures:
    """The figures of the traffic, known or assumed."""

    requests_per_hour: float | None
    labelled: float
    error_rate: float
    slow_share: float
    score_mean: float
    score_variance: float
    scoring: ScoringRule

    @classmethod
    def of(cls, traffic: CanaryTraffic, scoring: ScoringRule) -> _Figures:
        figures = {**TYPICAL.model_dump(), **traffic.model_dump(exclude_none=True)}
        return cls(**figures, scoring=scoring)


def _forecast(
    plan: Canary, traffic: _Figures, metric: Metric, margin: Margin, times: float
) -> CanaryForecast:
    mean = {"error_rate": traffic.error_rate, "latency": traffic.slow_share, "score": traffic.score_mean}[
        metric
    ]
    allowed = margin.absolute + margin.relative * mean
    worse_by = times * allowed
    champion, challenger, chances = _pairs(plan, traffic, metric, worse_by)
    needed, paid = thresholds(plan), payoffs(champion, challenger, margin)
    ways = {
        CanaryOutcome.PROMOTE: (paid[2], needed.within),
        CanaryOutcome.ROLL_BACK: (paid[0], needed.worse),
    }
    after = {outcome: _expected(payoff, chances, wealth) for outcome, (payoff, wealth) in ways.items()}
    outcome = min(after, key=lambda each: after[each])
    likely = CanaryForecast(
        metric=metric, champion=mean, margin=allowed, worse_by=worse_by, outcome=CanaryOutcome.UNDECIDED
    )
    if math.isinf(after[outcome]):
        return likely
    share = plan.share / 100 * (traffic.labelled if metric == "score" else 1.0)
    count = math.ceil(after[outcome])
    requests = math.ceil(count / share) if share else None
    likely = likely.model_copy(update={"outcome": outcome, "after": count, "requests": requests})
    if requests is None or not traffic.requests_per_hour:
        return likely
    hours = requests / traffic.requests_per_hour
    seen = traffic.requests_per_hour * plan.longest.total_seconds() / 3600 * share
    timed = {
        "takes": timedelta(seconds=round(min(hours * 3600, 1e9))),
        "power": _power(ways[outcome][0], chances, ways[outcome][1], seen),
    }
    return likely.model_copy(update=timed)


def _pairs(plan: Canary, traffic: _Figures, metric: Metric, worse_by: float) -> tuple[Floats, Floats, Floats]:
    """Return means of the champion's values, values of the challenger, and how probable each pair is."""
    import numpy as np

    times = max(1, round((100 - plan.share) / plan.share))
    if metric != "score":
        rate = traffic.error_rate if metric == "error_rate" else traffic.slow_share
        other = np.array(
            [math.comb(times, n) * rate**n * (1 - rate) ** (times - n) for n in range(times + 1)]
        )
        own = min(rate + worse_by, 1.0)
        champion, challenger = np.repeat(np.arange(times + 1) / times, 2), np.tile([0.0, 1.0], times + 1)
        return champion, challenger, np.outer(other, [1 - own, own]).ravel()
    is_bounded = traffic.scoring is ScoringRule.LOG_LOSS
    bound = plan.score_bound or (LOG_LOSS_BOUND if is_bounded else squared_error_bound(traffic.score_mean))
    mean, variance = traffic.score_mean / bound, traffic.score_variance / bound**2
    others, own_points = _two_points(mean, variance / times), _two_points(mean + worse_by / bound, variance)
    chances = np.outer(others[1], own_points[1]).ravel()
    return np.repeat(others[0], 2), np.tile(own_points[0], 2), chances


def _two_points(mean: float, variance: float) -> tuple[list[float], list[float]]:
    """Return 0 and another value, and their chances, with this mean and variance."""
    mean = min(max(mean, 1e-9), 1.0)
    square = variance + mean * mean
    return [0.0, min(square / mean, 1.0)], [variance / square, mean * mean / square]


def _expected(payoff: Floats, chances: Floats, wealth: float) -> float:
    """Return after how many values the wealth of the bets, which grows as expected, reaches its threshold."""
    import numpy as np

    growth = np.tensordot(chances, log_growth(payoff), axes=1)
    if growth.max() <= 0:
        return math.inf
    low, high = 1.0, 1.0
    while float(log_mean(high * growth)) < wealth:
        low, high = high, high * 2
        if high > MOST_VALUES:
            return math.inf
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if float(log_mean(middle * growth)) >= wealth else (middle, high)
    return high


def _power(payoff: Floats, chances: Floats, wealth: float, count: float) -> float:
    """Return how probably the wealth reaches its threshold within `count` values, by the normal approximation."""
    import numpy as np

    logs = log_growth(payoff)
    mean = np.tensordot(chances, logs, axes=1)
    spread = np.sqrt(np.maximum(np.tensordot(chances, logs * logs, axes=1) - mean * mean, 1e-12))
    missing = wealth + math.log(len(mean)) / 2  # of the wealth that is divided among bets, about half is lost
    scores = (count * mean - missing) / np.maximum(np.sqrt(count) * spread, 1e-12)
    return round(0.5 * (1 + math.erf(float(scores.max()) / math.sqrt(2))), 3)
