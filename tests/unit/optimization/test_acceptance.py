"""Acceptance of variants follows from the measurements alone."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from falaj.errors import InvalidInput
from falaj.optimization.acceptance import decide_acceptance
from falaj.optimization.runtime import latency, quality
from falaj.records.optimization import AcceptanceBudget, Interval, OptimizationVerdict

BUDGET = AcceptanceBudget(speedup=1.1, worse=0.01)
SAME = Interval(low=-0.001, middle=0.0, high=0.001)


def times(low: float, high: float) -> Interval:
    return Interval(low=low, middle=(low + high) / 2, high=high)


@pytest.mark.parametrize(
    ("single", "batch", "worse", "verdict", "words"),
    [
        ((1.9, 2.1), (1.0, 1.1), SAME, "accepted", "faster: one 2.00× (1.90 to 2.10); log loss +0.00%"),
        ((0.95, 1.0), (2.0, 2.2), SAME, "accepted", "faster: many 2.10×"),
        (
            (1.05, 9.0),
            (1.0, 1.1),
            SAME,
            "refused",
            "not 1.1 times as fast as the original with confidence; at best one",
        ),
        ((0.3, 0.5), (2.0, 2.2), SAME, "refused", "slower than the original: one 0.40×"),
        ((1.9, 2.1), (1.9, 2.1), Interval(low=0, middle=0.004, high=0.011), "refused", "may be 1.10% above"),
        ((1.9, 2.1), (1.9, 2.1), Interval(low=-0.2, middle=-0.1, high=-0.05), "accepted", "log loss -10.00%"),
    ],
    ids=["faster", "faster in batches", "perhaps faster", "slower somewhere", "perhaps worse", "better"],
)
def test_a_variant_is_judged(
    single: tuple[float, float], batch: tuple[float, float], worse: Interval, verdict: str, words: str
) -> None:
    speedup = {"one": times(*single), "many": times(*batch)}

    found, reason = decide_acceptance(speedup, worse, budget=BUDGET, metric="log_loss")

    assert found == OptimizationVerdict(verdict)
    assert words in reason


# -------------------------------------------------------------------------------------------------- quality


@pytest.fixture
def scored() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    target = random.integers(0, 2, 2000).astype(float)
    scores = np.clip(0.5 + (target - 0.5) * 0.4 + random.normal(size=2000) * 0.2, 0.01, 0.99)
    return target, np.round(scores, 2)  # rounded, so that there are ties


def test_log_loss_and_auc_are_those_of_scikit_learn(scored: tuple[np.ndarray, np.ndarray]) -> None:
    target, scores = scored

    evaluator = quality.choose_evaluator(target, scores)

    assert evaluator.metric == "log_loss"
    assert evaluator.metric_value(evaluator.losses(scores)) == pytest.approx(log_loss(target, scores))
    assert evaluator.auc(scores) == pytest.approx(roc_auc_score(target, scores))
    two_columns = np.column_stack([1 - scores, scores])
    assert evaluator.metric_value(evaluator.losses(two_columns)) == pytest.approx(log_loss(target, scores))


def test_more_classes_have_a_log_loss() -> None:
    target = np.arange(300) % 3.0
    predicted = np.full((300, 3), 0.2) + 0.4 * np.eye(3)[target.astype(int)]

    evaluator = quality.choose_evaluator(target, predicted)

    assert evaluator.metric_value(evaluator.losses(predicted)) == pytest.approx(-np.log(0.6))
    assert evaluator.auc(predicted) is None
    with pytest.raises(InvalidInput, match="target"):
        quality.choose_evaluator(target + 1, predicted)


@pytest.mark.parametrize("scores", [np.array([-2.0, 3.0]), np.array([[-2.0], [3.0]])])
def test_scores_that_are_not_probabilities_are_judged_by_rmse(scores: np.ndarray) -> None:
    evaluator = quality.choose_evaluator(np.array([0.0, 1.0]), scores)

    assert evaluator.metric == "rmse"
    assert evaluator.metric_value(evaluator.losses(scores)) == pytest.approx(2.0)


def test_equal_predictions_are_not_worse(scored: tuple[np.ndarray, np.ndarray]) -> None:
    target, scores = scored
    losses = quality.choose_evaluator(target, scores).losses(scores)

    found = quality.relative_loss_increase(
        quality.QualityEvaluator(target, "log_loss"), losses, losses, seed=0
    )

    assert (found.low, found.middle, found.high) == (0, 0, 0)


def test_the_interval_is_paired(scored: tuple[np.ndarray, np.ndarray]) -> None:
    """A shift that is equal in every row is known exactly, however much the rows differ."""
    target, scores = scored
    evaluator = quality.QualityEvaluator(target, "log_loss")
    losses = evaluator.losses(scores)

    found = quality.relative_loss_increase(evaluator, losses, losses * 1.05, seed=0)

    assert found.low == pytest.approx(0.05)
    assert found.high == pytest.approx(0.05)


def test_few_rows_give_a_wide_interval() -> None:
    random = np.random.default_rng(3)
    losses, noise = random.exponential(size=40), random.normal(size=40)

    found = quality.relative_loss_increase(
        quality.QualityEvaluator(losses, "log_loss"), losses, losses + 0.3 * noise, seed=0
    )

    assert found.low < 0 < found.high
    assert found.high > BUDGET.worse


# --------------------------------------------------------------------------------------------------- timing


def test_models_are_timed_alternately_at_every_batch_size() -> None:
    seen: list[tuple[str, int]] = []

    def model(name: str):
        def predict(rows: np.ndarray) -> np.ndarray:
            if seen[-1:] != [(name, len(rows))]:
                seen.append((name, len(rows)))
            return rows

        return predict

    latency.measure_interleaved({"a": model("a"), "b": model("b")}, np.zeros((5, 2), np.float32), rounds=2)

    turns = seen[6:]  # after the warm-up
    assert turns == [
        *(("a", 1), ("a", 32), ("a", 256), ("b", 1), ("b", 32), ("b", 256)),
        *(("b", 1), ("b", 32), ("b", 256), ("a", 1), ("a", 32), ("a", 256)),
    ]


def test_a_speedup_has_an_interval_over_the_rounds() -> None:
    slow, quick = latency.LatencySamples(), latency.LatencySamples()
    for size in latency.SIZES.values():
        slow.medians[size] = [2.0, 2.2, 1.8, 40.0]  # one round was disturbed
        quick.medians[size] = [1.0, 1.0, 1.0, 20.0]

    found = latency.speedups(slow, quick, seed=0)["a single row"]

    assert found.middle == pytest.approx(2.0)
    assert 1.8 <= found.low <= found.high <= 2.2


def test_the_timing_of_slow_models_is_bounded() -> None:
    found = latency.measure_interleaved({"a": lambda rows: rows}, np.zeros((5, 2), np.float32), limit_s=0.0)

    assert len(found["a"].medians[1]) == latency.MIN_ROUNDS
