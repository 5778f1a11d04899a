"""Quality of predictions, and how much worse a variant is by a paired bootstrap over the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from falaj.errors import InvalidInput
from falaj.optimization.runtime.candidates import Predict
from falaj.optimization.runtime.conversion.converted import Array
from falaj.records.optimization import HIGHER_IS_BETTER, AcceptanceBudget, Interval, QualityMetric

BATCH = 256
RESAMPLES = 2000
TAILS = (0.005, 0.995)
"""Ends of the 99% interval."""
CLIP = 1e-7
"""Probabilities are clipped this far from 0 and 1, about the resolution of float32."""
TINY = 1e-12
SUM_TOLERANCE = 1e-2

TargetKind = Literal["binary", "classes", "number"]


@dataclass(frozen=True)
class ScoredRows:
    """What the metric needs of each row's prediction; `groups` are the ranks of tied scores, for the AUC only."""

    metric: QualityMetric
    values: Array
    groups: Array | None = None

    def metric_value(self, counts: Array | None = None) -> float:
        """Return the metric over all rows, or where row i was drawn `counts[i]` times."""
        drawn = np.ones(len(self.values)) if counts is None else counts.astype(np.float64)
        if self.groups is not None:
            return _area(self.values, self.groups, drawn)
        mean = float(self.values @ drawn / drawn.sum())
        return mean**0.5 if self.metric == "rmse" else mean


@dataclass(frozen=True)
class QualityEvaluator:
    """Evaluates predictions of `target` by `metric`; `logits` says that class scores are not probabilities yet."""

    target: Array
    kind: TargetKind
    metric: QualityMetric
    logits: bool = False
    probabilities: bool = True

    def score(self, predicted: Array, metric: QualityMetric | None = None) -> ScoredRows:
        """Return what `metric`, by default that of the budget, needs of each row."""
        chosen = metric or self.metric
        if chosen == "rmse":
            return ScoredRows(chosen, (predicted.reshape(len(self.target)) - self.target) ** 2)
        if chosen == "accuracy":
            return ScoredRows(chosen, (self._class_of(predicted) == self.target).astype(np.float64))
        if chosen == "auc":
            _, groups = np.unique(_positive(predicted), return_inverse=True)
            return ScoredRows(chosen, (self.target == 1).astype(np.float64), groups)
        right = self._probability_of_target(predicted)
        return ScoredRows(chosen, -np.log(np.clip(right, CLIP, 1 - CLIP)))

    def metric_values(self, predicted: Array) -> dict[QualityMetric, float]:
        """Return every metric that fits the target and the predictions."""
        return {each: self.score(predicted, each).metric_value() for each in self.fitting}

    @property
    def fitting(self) -> tuple[QualityMetric, ...]:
        """The metrics that fit; the first is used unless the budget names one."""
        if self.kind == "number":
            return ("rmse",)
        if self.kind == "classes":
            return "log_loss", "accuracy"
        ranked: tuple[QualityMetric, ...] = (
            ("accuracy", "auc") if len(np.unique(self.target)) > 1 else ("accuracy",)
        )
        return ("log_loss", *ranked) if self.probabilities else ("rmse", *ranked)

    def of_rows(self, target: Array) -> QualityEvaluator:
        """Return the same evaluator for other rows."""
        return QualityEvaluator(target, self.kind, self.metric, self.logits, self.probabilities)

    def _class_of(self, predicted: Array) -> Array:
        if predicted.ndim == 2 and predicted.shape[1] > 1:
            return np.asarray(predicted.argmax(axis=1))
        return np.asarray(_positive(predicted) > (0.5 if self.probabilities else 0.0))

    def _probability_of_target(self, predicted: Array) -> Array:
        if predicted.ndim == 2 and predicted.shape[1] > 1:
            shares = softmax(predicted) if self.logits else predicted
            return np.asarray(shares[np.arange(len(shares)), self.target.astype(int)])
        return np.where(self.target == 1, _positive(predicted), 1 - _positive(predicted))


def choose_evaluator(
    target: Array, predicted: Array, *, metric: QualityMetric | None = None
) -> QualityEvaluator:
    """Choose the evaluator from the target and the predictions of the original. Raise if `metric` does not fit."""
    columns = 1 if predicted.ndim == 1 else int(np.prod(predicted.shape[1:]))
    if columns > 1:
        if not np.isin(target, np.arange(columns)).all() or predicted.ndim != 2:
            raise InvalidInput.at(
                "target",
                given=f"values such as {target[0]:g}",
                allowed=f"the class as 0 to {columns - 1}, as the model has {columns} outputs a row",
            )
        logits = not (_within(predicted) and np.abs(predicted.sum(axis=1) - 1).max() < SUM_TOLERANCE)
        kind: TargetKind = "classes" if columns > 2 else "binary"
        found = QualityEvaluator(target, kind, "log_loss", logits)
    elif not np.isin(target, (0, 1)).all():
        found = QualityEvaluator(target, "number", "rmse")
    elif _within(predicted):
        found = QualityEvaluator(target, "binary", "log_loss")
    else:
        found = QualityEvaluator(target, "binary", "rmse", probabilities=False)
    if metric is None:
        return found
    if metric not in found.fitting:
        raise InvalidInput.at(
            "budget",
            given=metric,
            allowed=f"a metric that fits the target and the model's output: {', '.join(found.fitting)}",
        )
    return QualityEvaluator(target, found.kind, metric, found.logits, found.probabilities)


def predict_all(predict: Predict, features: Array) -> Array:
    """Return the predictions of all rows, computed in batches."""
    parts = [predict(features[start : start + BATCH]) for start in range(0, len(features), BATCH)]
    return np.concatenate([np.asarray(part, np.float64) for part in parts])


def finite_rows(predicted: Array) -> Array:
    """Return which rows have a finite prediction."""
    return np.asarray(np.isfinite(predicted).reshape(len(predicted), -1).all(axis=1))


def worsening(original: ScoredRows, variant: ScoredRows, *, budget: AcceptanceBudget, seed: int) -> Interval:
    """Return by how much the variant is worse, with its interval; each resample draws the same rows of both."""
    random = np.random.default_rng(seed)
    count = len(original.values)
    drawn = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        counts = np.bincount(random.integers(0, count, count), minlength=count)
        drawn[number] = _worse(original, variant, budget, counts)
    low, high = np.quantile(drawn, TAILS)
    return Interval(low=float(low), middle=_worse(original, variant, budget, None), high=float(high))


def softmax(scores: Array) -> Array:
    shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))


def _worse(
    original: ScoredRows, variant: ScoredRows, budget: AcceptanceBudget, counts: Array | None
) -> float:
    before, after = original.metric_value(counts), variant.metric_value(counts)
    loss = before - after if original.metric in HIGHER_IS_BETTER else after - before
    return loss / max(before, TINY) if budget.relative else loss


def _within(predicted: Array) -> bool:
    return bool((predicted >= 0).all() and (predicted <= 1).all())


def _positive(predicted: Array) -> Array:
    """Return the score of the second class."""
    if predicted.ndim == 2 and predicted.shape[1] == 2:
        return np.asarray(predicted[:, 1] - predicted[:, 0]) if not _within(predicted) else predicted[:, 1]
    return predicted.reshape(len(predicted))


def _area(positive: Array, groups: Array, drawn: Array) -> float:
    """Return the area under the ROC curve: pairs ranked correctly, ties by half. 0.5 without pairs."""
    ones = np.bincount(groups, weights=drawn * positive)
    zeros = np.bincount(groups, weights=drawn * (1 - positive))
    pairs = ones.sum() * zeros.sum()
    below = np.cumsum(zeros) - zeros / 2
    return float(ones @ below / pairs) if pairs else 0.5
