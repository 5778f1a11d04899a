"""Scores of predictions against labels, percentiles of latency histograms, and sums of what shadows showed."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from math import isfinite, log

from falaj.errors import InvalidInput
from falaj.records.serving.endpoints import ScoringRule
from falaj.records.serving.shadows import OutputDifference, ShadowCounts, ShadowDifference
from falaj.records.serving.statistics import BOUNDS_S, percentile_ms

SMALLEST = 1e-7
"""Lower bound of probabilities, near the resolution of float32, so that log loss stays finite."""

LARGEST = sys.float_info.max
"""Sums and differences stay finite, as JSON needs them."""

UNSCORED_LOSS = 1e100
"""The loss of a prediction that is not finite, for a canary: more than the bound at which it cuts losses."""


def score(scoring: ScoringRule, predicted: Sequence[float], label: float) -> float | None:
    """Return the score of one row; `predicted` is a number or the probabilities of two or more classes.

    There is none if the prediction, or its error, is not a finite number.
    """
    if scoring is ScoringRule.SQUARED_ERROR:
        error = predicted[0] - label
        return error * error if isfinite(error * error) else None
    chance = probability(predicted, label)
    return -log(min(max(chance, SMALLEST), 1.0)) if isfinite(chance) else None


def probability(predicted: Sequence[float], label: float) -> float:
    """Return the predicted probability of the true class `label`."""
    number = int(label)
    if number != label or not 0 <= number < max(2, len(predicted)):
        classes = max(2, len(predicted))
        raise InvalidInput.at("value", given=label, allowed=f"a class from 0 to {classes - 1}")
    if len(predicted) == 1:
        return predicted[0] if number else 1 - predicted[0]
    return predicted[number]


def fits_log_loss(predicted: Sequence[float], label: float) -> bool:
    """Return whether label and prediction can come from a probabilistic classifier."""
    is_class = label == int(label) and 0 <= label < max(2, len(predicted))
    return is_class and all(-SMALLEST <= chance <= 1 + SMALLEST for chance in predicted)


def slow_bound_s(latency: Sequence[int], share: float = 0.05) -> float | None:
    """Return the largest bound that at least `share` of the requests exceeded; None without requests."""
    total, above = sum(latency), 0
    if not total:
        return None
    for place in range(len(BOUNDS_S) - 1, 0, -1):
        above = sum(latency[place + 1 :])
        if above >= share * total:
            return BOUNDS_S[place]
    return BOUNDS_S[0]


def slower_than(latency: Sequence[int], bound_s: float) -> int:
    """Return how many requests took longer than `bound_s`, a bound of the buckets."""
    return sum(latency[bisect_left(BOUNDS_S, bound_s * (1 - 1e-9)) + 1 :])


# ------------------------------------------------------------------------------------------------ shadows


def merge_counts(one: ShadowCounts, other: ShadowCounts) -> ShadowCounts:
    """Return the sum of two counts of the same pair of versions; `other` is the newer one."""
    outputs = {each.output: each for each in one.outputs}
    for each in other.outputs:
        before = outputs.get(each.output)
        outputs[each.output] = each if before is None else _merge_outputs(before, each)
    sums = {
        name: getattr(one, name) + getattr(other, name) for name in ("requests", "rows", "errors", "dropped")
    }
    return ShadowCounts(
        version=one.version,
        against=one.against,
        **sums,
        latency=_summed(one.latency, other.latency),
        against_latency=_summed(one.against_latency, other.against_latency),
        outputs=tuple(outputs.values()),
        problem=other.problem or one.problem,
    )


def _merge_outputs(one: OutputDifference, other: OutputDifference) -> OutputDifference:
    summed = ("values", "not_finite", "classes", "disagreeing")
    return OutputDifference(
        output=one.output,
        sum_difference=min(one.sum_difference + other.sum_difference, LARGEST),
        max_difference=max(one.max_difference, other.max_difference),
        **{name: getattr(one, name) + getattr(other, name) for name in summed},
    )


def _summed(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    short, long = sorted((tuple(one), tuple(other)), key=len)
    return tuple(each + (short[place] if place < len(short) else 0) for place, each in enumerate(long))


def difference_of(counts: ShadowCounts, *, since: datetime) -> ShadowDifference:
    """Return counts as a report has them."""
    plain = ("version", "against", "requests", "rows", "errors", "dropped", "outputs", "problem")
    return ShadowDifference(
        **{name: getattr(counts, name) for name in plain},
        since=since,
        p50_ms=percentile_ms(counts.latency, 0.5),
        p99_ms=percentile_ms(counts.latency, 0.99),
        against_p50_ms=percentile_ms(counts.against_latency, 0.5),
        against_p99_ms=percentile_ms(counts.against_latency, 0.99),
    )
