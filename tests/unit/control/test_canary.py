"""The verdict on a challenger: when it is given, which way, and how often it errs."""

from __future__ import annotations

import random

import pytest

from falaj.control.pipelines.canary import ANALYSES, analyses_reached, evaluate_canary
from falaj.records.control.pipelines import Canary, CanaryVerdict
from falaj.records.serving import VersionStats

PLAN = Canary(requests=500, labels=200)


def stats(version: str = "1", **more: float) -> VersionStats:
    facts = {"requests": 1000, "errors": 0, "labelled": 1000, "score_mean": 0.5, "score_variance": 0.04}
    return VersionStats.model_validate({"version": version, **facts, **more})


def verdict(challenger: VersionStats, plan: Canary = PLAN, **more: bool) -> CanaryVerdict | None:
    return evaluate_canary(stats(), challenger, plan, **more)


def test_there_is_no_verdict_before_both_have_answered_enough() -> None:
    assert verdict(stats("2", requests=499)) is None
    assert evaluate_canary(stats(requests=499), stats("2"), PLAN) is None
    assert verdict(stats("2", labelled=199)) is None


def test_a_better_challenger_is_promoted() -> None:
    found = verdict(stats("2", score_mean=0.4))

    assert found is not None
    assert found.promote
    assert found.worse_by == pytest.approx(-0.1)
    assert "1000 labels" in found.words


def test_a_worse_challenger_is_rolled_back() -> None:
    found = verdict(stats("2", score_mean=0.7))

    assert found is not None
    assert not found.promote
    assert "worse" in found.words


def test_failing_requests_roll_it_back_before_the_minimum_is_reached() -> None:
    found = verdict(stats("2", requests=20, errors=6, labelled=0))

    assert found is not None
    assert not found.promote
    assert "6 of 20 requests failed" in found.words


def test_the_champions_own_errors_are_allowed_to_the_challenger() -> None:
    champion = stats(errors=50)

    assert evaluate_canary(champion, stats("2", errors=50, score_mean=0.4), PLAN).promote  # type: ignore[union-attr]
    assert not evaluate_canary(champion, stats("2", errors=61, score_mean=0.4), PLAN).promote  # type: ignore[union-attr]


def test_without_labels_only_errors_are_judged() -> None:
    found = verdict(stats("2", labelled=0, score_mean=0.9), PLAN.model_copy(update={"labels": 0}))

    assert found is not None
    assert found.promote
    assert "no score" in found.words


def test_what_is_undecided_is_looked_at_again_with_twice_the_labels() -> None:
    close = stats("2", labelled=200, score_mean=0.505)

    assert verdict(close) is None
    assert analyses_reached(stats(), close, PLAN) == 1
    assert verdict(close, analysed=1) is None
    last = verdict(close.model_copy(update={"labelled": 800}), analysed=2)
    assert last is not None
    assert not last.promote
    assert "could not be shown" in last.words


def test_time_that_is_over_rolls_back() -> None:
    found = verdict(stats("2", requests=3, labelled=0), is_over=True)

    assert found is not None
    assert not found.promote
    assert "too little was seen" in found.words


def test_a_worse_challenger_is_promoted_no_more_often_than_stated() -> None:
    """A challenger just beyond the tolerance, looked at three times: 5 % in all, and some for chance."""
    random_numbers = random.Random(7)
    worse = 0.5 * (1 + PLAN.tolerance)
    promoted = sum(_simulated(random_numbers, worse) for _ in range(400))

    assert promoted / 400 <= 0.05 + 0.025


def test_a_challenger_that_is_much_better_is_nearly_always_promoted() -> None:
    random_numbers = random.Random(8)

    assert sum(_simulated(random_numbers, 0.42) for _ in range(200)) / 200 > 0.95


def _simulated(numbers: random.Random, mean: float) -> bool:
    """Whether a challenger with this true mean score is promoted, as the labels come in."""
    drawn = {
        name: [numbers.gauss(centre, 0.2) for _ in range(PLAN.labels * 2 ** (ANALYSES - 1))]
        for name, centre in (("1", 0.5), ("2", mean))
    }
    for look in range(ANALYSES):
        count = PLAN.labels * 2**look
        champion, challenger = (_of(name, scores[:count]) for name, scores in drawn.items())
        found = evaluate_canary(champion, challenger, PLAN, analysed=look)
        if found is not None:
            return found.promote
    raise AssertionError("the last look decides")


def _of(version: str, scores: list[float]) -> VersionStats:
    mean = sum(scores) / len(scores)
    variance = sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
    return stats(version, labelled=len(scores), score_mean=mean, score_variance=variance)
