"""Acceptance of variants follows from the measurements alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

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
        (
            (1.9, 2.1),
            (1.0, 1.1),
            SAME,
            "accepted",
            "faster than the original: one 2.00× (1.90 to 2.10); log loss +0.00%",
        ),
        ((0.95, 1.0), (2.0, 2.2), SAME, "accepted", "faster than the original: many 2.10×"),
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


def test_metrics_are_those_of_scikit_learn(scored: tuple[np.ndarray, np.ndarray]) -> None:
    target, scores = scored

    evaluator = quality.choose_evaluator(target, scores)

    found = evaluator.metric_values(scores)
    assert evaluator.metric == "log_loss"
    assert found["log_loss"] == pytest.approx(log_loss(target, scores))
    assert found["auc"] == pytest.approx(roc_auc_score(target, scores))
    assert found["accuracy"] == pytest.approx(accuracy_score(target, scores > 0.5))
    assert evaluator.metric_values(np.column_stack([1 - scores, scores]))["auc"] == pytest.approx(
        found["auc"]
    )


def test_the_auc_of_a_resample_is_that_of_the_drawn_rows(scored: tuple[np.ndarray, np.ndarray]) -> None:
    target, scores = scored
    drawn = np.random.default_rng(2).integers(0, len(target), len(target))

    found = quality.choose_evaluator(target, scores, metric="auc").score(scores)

    counts = np.bincount(drawn, minlength=len(target))
    assert found.metric_value(counts) == pytest.approx(roc_auc_score(target[drawn], scores[drawn]))


def test_more_classes_have_a_log_loss_and_an_accuracy() -> None:
    target = np.arange(300) % 3.0
    predicted = np.full((300, 3), 0.2) + 0.4 * np.eye(3)[target.astype(int)]

    found = quality.choose_evaluator(target, predicted).metric_values(predicted)
    of_logits = quality.choose_evaluator(target, np.log(predicted)).metric_values(np.log(predicted))

    assert found == {"log_loss": pytest.approx(-np.log(0.6)), "accuracy": 1.0}
    assert of_logits == {"log_loss": pytest.approx(-np.log(0.6)), "accuracy": 1.0}
    with pytest.raises(InvalidInput, match="target"):
        quality.choose_evaluator(target + 1, predicted)


@pytest.mark.parametrize("scores", [np.array([-2.0, 3.0]), np.array([[-2.0], [3.0]])])
def test_scores_that_are_not_probabilities_are_judged_by_rmse(scores: np.ndarray) -> None:
    evaluator = quality.choose_evaluator(np.array([0.0, 1.0]), scores)

    assert evaluator.metric == "rmse"
    assert evaluator.metric_values(scores) == {"rmse": pytest.approx(2.0), "accuracy": 1.0, "auc": 1.0}


@pytest.mark.parametrize(
    ("metric", "target", "predicted"),
    [
        ("auc", [1.5, 2.5], [1.0, 2.0]),
        ("log_loss", [0.0, 1.0], [-2.0, 3.0]),
        ("auc", [0.0, 1.0, 2.0], np.eye(3)),
    ],
    ids=["a number", "no probabilities", "three classes"],
)
def test_a_metric_that_does_not_fit_is_refused(metric: str, target: Any, predicted: Any) -> None:
    with pytest.raises(InvalidInput, match="budget"):
        quality.choose_evaluator(np.asarray(target), np.asarray(predicted), metric=metric)


def test_equal_predictions_are_not_worse(scored: tuple[np.ndarray, np.ndarray]) -> None:
    target, scores = scored
    same = quality.choose_evaluator(target, scores).score(scores)

    found = quality.worsening(same, same, budget=BUDGET, seed=0)

    assert (found.low, found.middle, found.high) == (0, 0, 0)


def test_the_interval_is_paired() -> None:
    """A shift that is equal in every row is known exactly, however much the rows differ."""
    losses = np.random.default_rng(1).exponential(size=2000)

    found = quality.worsening(
        quality.ScoredRows("log_loss", losses),
        quality.ScoredRows("log_loss", losses * 1.05),
        budget=BUDGET,
        seed=0,
    )

    assert found.low == pytest.approx(0.05)
    assert found.high == pytest.approx(0.05)


def test_few_rows_give_a_wide_interval() -> None:
    random = np.random.default_rng(3)
    losses, noise = random.exponential(size=40), random.normal(size=40)

    found = quality.worsening(
        quality.ScoredRows("log_loss", losses),
        quality.ScoredRows("log_loss", losses + 0.3 * noise),
        budget=BUDGET,
        seed=0,
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

    latency.measure_interleaved(
        {"a": model("a"), "b": model("b")}, np.zeros((5, 2), np.float32), best={"a": 256, "b": 64}, rounds=2
    )

    turns = seen[6:]  # after the warm-up
    assert turns == [
        *(("a", 1), ("a", 32), ("a", 256), ("b", 1), ("b", 32), ("b", 64)),
        *(("b", 1), ("b", 32), ("b", 64), ("a", 1), ("a", 32), ("a", 256)),
    ]


def test_the_best_batch_is_found_by_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def seconds(predict: object, batch: np.ndarray) -> float:
        tried.append(len(batch))
        return 1.0 + max(0, len(batch) - 16)  # a call costs the same up to 16 rows

    monkeypatch.setattr(latency, "_quickest", seconds)

    found = latency.find_best_batch(lambda rows: rows, np.zeros((5, 2), np.float32))

    assert (found, tried) == ((16, 16.0), [1, 2, 4, 8, 16, 32, 64])


def test_a_search_for_the_best_batch_that_was_disturbed_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []

    def seconds(predict: object, batch: np.ndarray) -> float:
        tried.append(len(batch))
        return 100.0 if len(tried) in (2, 3) else 1.0 + max(0, len(batch) - 16)

    monkeypatch.setattr(latency, "_quickest", seconds)

    found = latency.find_best_batches({"a": lambda rows: rows}, np.zeros((5, 2), np.float32))

    assert tried[:4] == [1, 2, 4, 1]  # the first search ended early
    assert found == {"a": 16}


def test_the_best_batch_is_the_fastest_of_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_block(predict: object, parts: object, size: int, timed: latency.LatencySamples) -> None:
        timed.medians.setdefault(size, []).append(1.0)  # a call costs the same whatever its size

    monkeypatch.setattr(latency, "_time_block", time_block)

    found = latency.measure_interleaved({"a": lambda rows: rows}, np.zeros((5, 2), np.float32), best={"a": 2})

    assert found["a"].best == 32


def test_a_speedup_has_an_interval_over_the_rounds() -> None:
    slow, quick = latency.LatencySamples(), latency.LatencySamples()
    for size in slow.sizes.values():
        slow.medians[size] = [2.0, 2.2, 1.8, 40.0]  # one round was disturbed
        quick.medians[size] = [1.0, 1.0, 1.0, 20.0]

    found = latency.speedups(slow, quick, seed=0)["a single row"]

    assert found.middle == pytest.approx(2.0)
    assert 1.8 <= found.low <= found.high <= 2.2


def test_the_timing_of_slow_models_is_bounded() -> None:
    found = latency.measure_interleaved(
        {"a": lambda rows: rows}, np.zeros((5, 2), np.float32), best={"a": 64}, limit_s=0.0
    )

    assert len(found["a"].medians[1]) == latency.MIN_ROUNDS


# --------------------------------------------------------------------------------------------------- honesty


def noisy_times(random: np.random.Generator, *, seconds: float, rounds: int = 40) -> list[float]:
    """Return medians of rounds on a machine that others use: some are disturbed by up to half."""
    disturbed = random.random(rounds) < 0.2
    return list(
        seconds * (1 + 0.03 * random.standard_normal(rounds) + disturbed * random.uniform(0, 0.5, rounds))
    )


def noisy_samples(random: np.random.Generator, *, times: float) -> latency.LatencySamples:
    """Return what is measured of a model that is `times` as fast as the original."""
    made = latency.LatencySamples(best=64)
    for size in made.sizes.values():
        made.medians[size] = noisy_times(random, seconds=1e-5 * size / times)
    return made


def judged(random: np.random.Generator, *, times: float, worse: float, budget: AcceptanceBudget) -> str:
    """Return the verdict on a variant that is `times` as fast and so much `worse` in accuracy, as measured."""
    original, control, variant = (noisy_samples(random, times=each) for each in (1.0, 1.0, times))
    right = random.random(4000) < 0.9
    spoiled = right & ~(random.random(4000) < worse / 0.9)
    before, after = (quality.ScoredRows("accuracy", each.astype(float)) for each in (right, spoiled))
    verdict, _ = decide_acceptance(
        latency.speedups(original, variant, seed=0),
        quality.worsening(before, after, budget=budget, seed=0),
        budget=budget,
        metric="accuracy",
        noise=latency.speedups(original, control, seed=0),
    )
    return str(verdict)


def test_a_copy_of_the_original_is_never_accepted_as_faster() -> None:
    """Even where the budget asks for no speedup at all, noise alone does not count as one."""
    random = np.random.default_rng(11)
    budget = AcceptanceBudget(speedup=1.0, metric="accuracy", worse=0.01, relative=False)

    found = [judged(random, times=1.0, worse=0.0, budget=budget) for _ in range(40)]

    assert found == ["refused"] * 40


def test_a_variant_slightly_outside_the_quality_budget_is_never_accepted() -> None:
    random = np.random.default_rng(12)
    budget = AcceptanceBudget(metric="accuracy", worse=0.01, relative=False)

    found = [judged(random, times=2.0, worse=0.011, budget=budget) for _ in range(40)]

    assert found == ["refused"] * 40


def test_a_variant_that_is_faster_and_as_good_is_accepted_every_time() -> None:
    random = np.random.default_rng(13)
    budget = AcceptanceBudget(metric="accuracy", worse=0.01, relative=False)

    found = [judged(random, times=1.5, worse=0.002, budget=budget) for _ in range(40)]

    assert found == ["accepted"] * 40


def test_a_variant_that_is_slower_at_one_batch_size_is_refused() -> None:
    random = np.random.default_rng(14)
    original, variant = noisy_samples(random, times=1.0), noisy_samples(random, times=2.0)
    variant.medians[32] = noisy_times(random, seconds=1e-5 * 32 / 0.8)

    verdict, reason = decide_acceptance(
        latency.speedups(original, variant, seed=0), SAME, budget=BUDGET, metric="log_loss"
    )

    assert verdict is OptimizationVerdict.REFUSED
    assert "slower than the original: 32 rows 0.8" in reason
