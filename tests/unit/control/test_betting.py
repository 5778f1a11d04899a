"""Betting on the difference of two versions: its error rates under continuous peeking, and how it pairs values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from falaj.control.pipelines.betting import (
    Comparison,
    Margin,
    Pairing,
    Thresholds,
    indicators,
    log_growth,
    log_mean,
    payoffs,
    shuffled,
)
from falaj.control.pipelines.power import forecast_canary
from falaj.records.control.pipelines import Canary, CanaryOutcome, CanaryTraffic

Floats = npt.NDArray[np.float64]
RISKS = Thresholds.of(false_rollback=0.01, false_promotion=0.05, metrics=1)
UNIT = st.floats(0, 1)


def reached(payoff: Floats, threshold: float) -> Floats:
    """Return after how many values each canary's wealth first reaches the threshold, looking after each; inf: never."""
    paths = log_mean(np.cumsum(log_growth(payoff), axis=1)) >= threshold
    return np.where(paths.any(axis=1), paths.argmax(axis=1) + 1.0, np.inf)


def simulated(
    rng: np.random.Generator,
    champion: float,
    challenger: float,
    *,
    canaries: int,
    values: int,
    times: int = 1,
) -> tuple[Floats, Floats]:
    """Return means of the champion's values and values of the challenger, of Bernoulli trials."""
    others = rng.binomial(times, champion, size=(canaries, values)) / times
    return others, rng.binomial(1, challenger, size=(canaries, values)).astype(float)


@pytest.mark.parametrize(("rate", "times"), [(0.05, 1), (0.1, 9), (0.3, 1)])
def test_an_equal_challenger_is_rolled_back_no_more_often_than_stated(rate: float, times: int) -> None:
    others, own = simulated(np.random.default_rng(13), rate, rate, canaries=500, values=1000, times=times)

    first = reached(payoffs(others, own, Margin(0.01))[0], RISKS.worse)

    assert np.isfinite(first).mean() <= 0.01


def test_a_challenger_at_the_margin_is_promoted_no_more_often_than_stated() -> None:
    others, own = simulated(np.random.default_rng(14), 0.05, 0.08, canaries=500, values=1000)

    first = reached(payoffs(others, own, Margin(0.03))[2], RISKS.within)

    assert 0 < np.isfinite(first).mean() <= 0.05


def test_a_worse_challenger_is_rolled_back_and_an_equal_one_promoted() -> None:
    rng = np.random.default_rng(15)
    worse = payoffs(*simulated(rng, 0.05, 0.15, canaries=200, values=1000), Margin(0.05))
    equal = payoffs(*simulated(rng, 0.05, 0.05, canaries=200, values=1000), Margin(0.05))

    assert np.median(reached(worse[0], RISKS.worse)) < 300
    assert np.median(reached(equal[2], RISKS.within)) < 600


@given(st.lists(st.tuples(UNIT, UNIT), min_size=1, max_size=20), UNIT, UNIT)
def test_no_bet_loses_more_than_its_stake(
    pairs: list[tuple[float, float]], absolute: float, relative: float
) -> None:
    champion, challenger = np.array(pairs).T

    worse, beyond, within = payoffs(champion, challenger, Margin(absolute, relative))

    for payoff in (worse, beyond, within):
        assert payoff.min() >= -1 - 1e-12
    assert (beyond <= worse + 1e-12).all(), "so one threshold keeps the risk of both"


@given(st.integers(1, 50), st.integers(1, 400), st.integers(1, 60))
def test_all_values_that_came_together_are_matched_evenly(share: int, champion: int, challenger: int) -> None:
    means, own = Pairing(share).add([0.5] * champion, [0.25] * challenger)

    groups = min(champion, challenger) if champion >= (100 - share) // share else 0
    assert (len(means), len(own)) == (groups, groups)
    assert (means == 0.5).all()
    assert (own == 0.25).all()


def test_values_wait_for_those_that_they_are_matched_with() -> None:
    pairing = Pairing(10)

    assert len(pairing.add([1.0] * 5, [])[0]) == 0
    assert len(pairing.add([1.0] * 3, [0.0])[0]) == 0
    means, own = pairing.add([0.0], [])

    assert (means.tolist(), own.tolist()) == ([8 / 9], [0.0])


def test_a_burst_that_both_suffer_rolls_nothing_back() -> None:
    """A database fails for eight reports of each sixteen; the share of requests varies by chance."""
    rng, rolled = np.random.default_rng(17), 0
    for _ in range(50):
        comparison = Comparison(Margin(0.01), RISKS, share=30)
        for report in range(50):
            count, rate = rng.poisson(40), 0.9 if report // 8 % 2 else 0.02
            own = rng.binomial(count, 0.3)
            comparison.add(*((rng.random(size) < rate).astype(float).tolist() for size in (count - own, own)))
        rolled += comparison.failed

    assert rolled <= 1, "matching first come, first matched rolled back a fifth"


def test_a_comparison_latches_what_was_shown() -> None:
    comparison = Comparison(Margin(0.05), RISKS, share=50)
    comparison.add([0.0] * 500, [0.0] * 500)
    assert comparison.passed

    comparison.add([0.0] * 200, [1.0] * 200)

    assert comparison.log_within < RISKS.within
    assert comparison.passed
    assert comparison.failed


def test_orders_are_those_of_their_seed() -> None:
    assert indicators(1000, 17, "a") == indicators(1000, 17, "a") != indicators(1000, 17, "b")
    assert sum(indicators(1000, 17, "a")) == 17
    assert sorted(shuffled([0.1, 0.2, 0.3], "a")) == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("share", "times", "worse", "outcome"),
    [
        (50, 1, 0.0, CanaryOutcome.PROMOTE),
        (10, 9, 0.0, CanaryOutcome.PROMOTE),
        (10, 9, 2.0, CanaryOutcome.ROLL_BACK),
    ],
)
def test_a_forecast_is_near_what_is_simulated(
    share: int, times: int, worse: float, outcome: CanaryOutcome
) -> None:
    plan = Canary(share=share, labels=0, latency=1.0, error_rate=0.03)
    (forecast,) = forecast_canary(
        plan, CanaryTraffic(error_rate=0.03, requests_per_hour=1000), worse=(worse,)
    )
    drawn = simulated(
        np.random.default_rng(16), 0.03, 0.03 * (1 + worse), canaries=200, values=2000, times=times
    )
    paid = payoffs(*drawn, Margin(0.03))
    first = reached(paid[2], RISKS.within) if worse == 0 else reached(paid[0], RISKS.worse)

    assert forecast.outcome is outcome
    assert forecast.after == pytest.approx(np.median(first), rel=0.35)
