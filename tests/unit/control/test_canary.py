"""The verdict on a challenger: when it is given, which way, its words, and that a restart does not change it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from pydantic import ValidationError

from falaj.control.pipelines.verdict import REFERENCE_REQUESTS, CanaryJudge
from falaj.records.control.pipelines import Canary, CanaryOutcome, CanaryVerdict
from falaj.records.serving.endpoints import ScoringRule
from falaj.records.serving.statistics import Observation, VersionCounts, VersionStats

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
REQUESTS = Canary(share=50, requests=100, labels=0, latency=1.0)
"""Only error rates are judged."""
LABELS = Canary(share=50, requests=10, labels=50, error_rate=1.0, latency=1.0, tolerance=0.1)
"""Only scores are judged."""


def requests(number: int, *, errors: tuple[int, int], of: tuple[int, int] = (100, 100)) -> Observation:
    counts = [
        VersionCounts(version=version, requests=count, errors=failed, latency=(0, 0, 0, 0, count))
        for version, count, failed in zip(("1", "2"), of, errors, strict=True)
    ]
    return Observation(number=number, at=NOON, requests=tuple(counts))


def labels(number: int, champion: float, challenger: float, *, count: int = 100) -> Observation:
    """Scores half of which are 0.1 above their mean, and half 0.1 below."""
    scores = {
        version: tuple(mean + sign * 0.1 for sign in (-1, 1) * (count // 2))
        for version, mean in (("1", champion), ("2", challenger))
    }
    return Observation(number=number, at=NOON, scores=scores)


def judged(plan: Canary, *seen: Observation, scoring: ScoringRule = ScoringRule.LOG_LOSS) -> CanaryJudge:
    judge = CanaryJudge(plan, champion="1", challenger="2", slow_above_s=0.005)
    for each in seen:
        judge.add(each, scoring)
    return judge


def verdict(judge: CanaryJudge, **more: timedelta) -> CanaryVerdict:
    return judge.verdict(VersionStats(version="1"), VersionStats(version="2"), **more)


def test_an_equal_challenger_is_promoted_when_it_is_shown_to_be_within_the_margin() -> None:
    early = judged(REQUESTS, *(requests(number, errors=(1, 1)) for number in range(1, 5)))
    late = judged(REQUESTS, *(requests(number, errors=(1, 1)) for number in range(1, 41)))

    assert early.outcome() is CanaryOutcome.UNDECIDED
    assert late.outcome() is CanaryOutcome.PROMOTE
    assert "it is within the margins: error rate 1.00% against 1.00% of the champion" in verdict(late).words


def test_a_challenger_with_chance_errors_above_the_margin_is_not_rolled_back() -> None:
    """33 errors of 500 against 50 of 1,000 are within chance; the rule of decision 0011 rolled it back."""
    judge = judged(REQUESTS.model_copy(update={"share": 33}), requests(1, errors=(50, 33), of=(1000, 500)))

    assert judge.outcome() is CanaryOutcome.UNDECIDED


def test_a_challenger_that_always_fails_is_rolled_back_within_twenty_requests() -> None:
    seen = [requests(number, errors=(0, 1), of=(1, 1)) for number in range(1, 21)]

    found = verdict(judged(REQUESTS, *seen))

    assert found.outcome is CanaryOutcome.ROLL_BACK
    assert not found.promote
    assert "it is worse: error rate 100.00% against 0.00% of the champion" in found.words


def test_errors_that_both_have_alike_roll_nothing_back() -> None:
    """A failing database fails the requests of both."""
    judge = judged(REQUESTS, requests(1, errors=(0, 0)), requests(2, errors=(100, 100)))

    assert judge.outcome() is CanaryOutcome.UNDECIDED


def test_a_slower_challenger_is_rolled_back() -> None:
    plan = Canary(share=50, requests=10, labels=0, error_rate=1.0)
    counts = (
        VersionCounts(version="1", requests=200, latency=(0, 0, 0, 0, 190, 0, 10)),
        VersionCounts(version="2", requests=200, latency=(0, 0, 0, 0, 120, 0, 80)),
    )

    found = verdict(judged(plan, Observation(number=1, at=NOON, requests=counts)))

    assert found.outcome is CanaryOutcome.ROLL_BACK
    assert "slow requests 40.00% against 5.00% of the champion, on 200 requests" in found.words


def test_the_requests_that_set_the_bound_of_slow_ones_are_not_compared() -> None:
    plan = Canary(share=50, requests=10, labels=0, error_rate=1.0)
    judge = CanaryJudge(plan, champion="1", challenger="2")

    for number in range(1, 4):
        judge.add(requests(number, errors=(0, 0), of=(REFERENCE_REQUESTS // 2,) * 2), None)

    assert judge.comparisons["latency"].count == REFERENCE_REQUESTS // 2


def test_a_score_within_the_tolerance_is_promoted_and_a_worse_one_rolled_back() -> None:
    good = judged(LABELS, requests(1, errors=(0, 0)), labels(2, 0.5, 0.48, count=4000))
    bad = judged(LABELS, requests(1, errors=(0, 0)), labels(2, 0.5, 1.5, count=400))

    assert good.outcome() is CanaryOutcome.PROMOTE
    assert bad.outcome() is CanaryOutcome.ROLL_BACK
    assert "score 1.5000 against 0.5000 of the champion, on 400 labels" in verdict(bad).words


def test_nothing_is_promoted_before_the_stated_numbers_are_reached() -> None:
    enough = LABELS.model_copy(update={"labels": 4001})
    judge = judged(enough, requests(1, errors=(0, 0)), labels(2, 0.5, 0.4, count=4000))

    assert judge.outcome() is CanaryOutcome.UNDECIDED
    assert (
        "within the margins, but 100 of 10 requests and 4,000 of 4,001 labels were seen"
        in verdict(judge).words
    )


def test_an_undecided_verdict_says_how_many_more_labels_decide() -> None:
    judge = judged(LABELS, requests(1, errors=(0, 0)), labels(2, 0.5, 0.5, count=200))

    found = verdict(judge, elapsed=timedelta(hours=1))

    more = found.evidence[0].more
    assert found.outcome is CanaryOutcome.UNDECIDED
    assert more is not None
    assert f"about {more:,} more labels of the challenger would decide" in found.words
    assert "h at this rate" in found.words
    followed = judged(
        LABELS,
        requests(1, errors=(0, 0)),
        labels(2, 0.5, 0.5, count=200),
        labels(3, 0.5, 0.5, count=2 * more),
    )
    assert followed.outcome() is CanaryOutcome.PROMOTE


def test_without_data_an_undecided_verdict_says_so() -> None:
    found = verdict(judged(LABELS)).words

    assert "no labels could be compared by score; it takes 50 labels of each version at least" in found


def test_a_challenger_within_the_margin_stays_so_though_it_is_a_little_worse() -> None:
    """Its error rate passes first; while labels are missing, more and more evidence shows 0.3 % more errors."""
    plan = Canary(share=50, requests=100, labels=50, latency=1.0, error_rate=0.05)
    judge = judged(plan, *(requests(n, errors=(10, 11), of=(1000, 1000)) for n in range(1, 101)))
    comparison = judge.comparisons["error_rate"]

    assert comparison.passed
    judge.add(requests(101, errors=(1000, 1300), of=(100_000, 100_000)), None)
    assert comparison.log_worse > comparison.thresholds.worse
    assert judge.outcome() is CanaryOutcome.UNDECIDED


def test_the_same_observations_give_the_same_verdict_after_a_restart() -> None:
    seen = [requests(n, errors=(n % 4, n % 3), of=(90, 13)) for n in range(1, 60)]
    plan = REQUESTS.model_copy(update={"share": 13})

    first, second = (judged(plan, *seen).comparisons["error_rate"] for _ in range(2))

    assert first.log_worse == second.log_worse
    assert first.count == second.count > 600


def test_squared_errors_are_bounded_by_the_champions_mean() -> None:
    """One enormous error cannot decide; a bound that is not known comes from labels that are not compared."""
    judge = CanaryJudge(LABELS, champion="1", challenger="2")
    judge.add(labels(1, 4.0, 4.0, count=100), ScoringRule.SQUARED_ERROR)
    scores = {"1": (4.0,) * 10, "2": (4.0,) * 9 + (1e12,)}

    judge.add(Observation(number=2, at=NOON, scores=scores), ScoringRule.SQUARED_ERROR)

    assert judge.comparisons["score"].count == 10
    evidence = verdict(judge).evidence[0]
    assert evidence.challenger == pytest.approx((9 * 4 + 40) / 10)
    assert judge.outcome() is CanaryOutcome.UNDECIDED


def test_a_canary_judges_at_least_one_metric() -> None:
    with pytest.raises(ValidationError, match="at least one of"):
        Canary(error_rate=1, latency=1, labels=0)


def test_a_stated_bound_of_scores_catches_a_large_regression_sooner() -> None:
    bounded = LABELS.model_copy(update={"score_bound": 2.0})
    seen = requests(1, errors=(0, 0)), labels(2, 0.5, 1.5, count=40)

    assert judged(LABELS, *seen).outcome() is CanaryOutcome.UNDECIDED
    assert judged(bounded, *seen).outcome() is CanaryOutcome.ROLL_BACK


@pytest.mark.slow
def test_equals_are_not_rolled_back_by_three_metrics_at_once_in_restless_traffic() -> None:
    """Errors come in bursts, latency and scores vary with each report, and shares with chance; 1 % is stated."""
    plan, rng, outcomes = Canary(share=30, requests=10, labels=10), np.random.default_rng(5), []
    for canary in range(150):
        judge = CanaryJudge(plan, champion="1", challenger="2", slow_above_s=0.005)
        for number in range(1, 61):
            count = rng.poisson(40)
            own = rng.binomial(count, 0.3)
            failing, slow, loss = (
                rng.choice([0.02, 0.02, 0.02, 0.8]),
                rng.uniform(0, 0.5),
                rng.uniform(0.3, 0.9),
            )
            sizes = {"1": count - own, "2": own}
            counts = [
                VersionCounts(
                    version=version,
                    requests=size,
                    errors=rng.binomial(size, failing),
                    latency=(0, 0, 0, 0, size - (late := rng.binomial(size, slow)), 0, late),
                )
                for version, size in sizes.items()
            ]
            scores = {version: tuple(np.sort(rng.gamma(1, loss, size))) for version, size in sizes.items()}
            at = NOON + timedelta(days=canary)
            judge.add(
                Observation(number=number, at=at, requests=tuple(counts), scores=scores), ScoringRule.LOG_LOSS
            )
            if judge.outcome() is not CanaryOutcome.UNDECIDED:
                break
        outcomes.append(judge.outcome())

    assert outcomes.count(CanaryOutcome.ROLL_BACK) <= 2
