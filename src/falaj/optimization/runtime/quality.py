"""Quality of predictions, and the loss increase of a variant by a paired bootstrap over the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from falaj.errors import InvalidInput
from falaj.optimization.runtime.candidates import Predict
from falaj.optimization.runtime.conversion.converted import Array
from falaj.records.optimization import Interval

BATCH = 1024
RESAMPLES = 1000
CLIP = 1e-7
"""Probabilities are clipped this far from 0 and 1, about the resolution of float32."""
TINY = 1e-12

Metric = Literal["log_loss", "rmse"]


@dataclass(frozen=True)
class QualityEvaluator:
    """Evaluates predictions of `target`: log loss for classes and probabilities, else RMSE."""

    target: Array
    metric: Metric

    def losses(self, predicted: Array) -> Array:
        """Return the loss of each row; the squared error for RMSE."""
        if self.metric == "rmse":
            return np.asarray((predicted.reshape(len(self.target)) - self.target) ** 2)
        chosen = (
            predicted[np.arange(len(predicted)), self.target.astype(int)]
            if _has_classes(predicted)
            else (np.where(self.target == 1, _positive(predicted), 1 - _positive(predicted)))
        )
        return np.asarray(-np.log(np.clip(chosen, CLIP, 1 - CLIP)))

    def metric_value(self, losses: Array) -> float:
        """Return the metric over all rows."""
        mean = float(losses.mean())
        return mean**0.5 if self.metric == "rmse" else mean

    def auc(self, predicted: Array) -> float | None:
        """Return the area under the ROC curve if the target is 0 and 1."""
        if set(np.unique(self.target)) != {0.0, 1.0} or _has_classes(predicted):
            return None
        return _area(_positive(predicted), self.target == 1)


def choose_evaluator(target: Array, predicted: Array) -> QualityEvaluator:
    """Choose the evaluator from the target and the predictions of the original."""
    columns = 1 if predicted.ndim == 1 else int(np.prod(predicted.shape[1:]))
    if columns > 1:
        if not np.isin(target, np.arange(columns)).all() or predicted.ndim != 2:
            raise InvalidInput.at(
                "target",
                given=f"values such as {target[0]:g}",
                allowed=f"the class as 0 to {columns - 1}, as the model has {columns} outputs a row",
            )
        return QualityEvaluator(target, "log_loss")
    within = bool((predicted >= 0).all() and (predicted <= 1).all())
    return QualityEvaluator(target, "log_loss" if within and np.isin(target, (0, 1)).all() else "rmse")


def predict_all(predict: Predict, features: Array) -> Array:
    """Return the predictions of all rows, computed in batches."""
    parts = [predict(features[start : start + BATCH]) for start in range(0, len(features), BATCH)]
    return np.concatenate([np.asarray(part, np.float64) for part in parts])


def finite_rows(predicted: Array) -> Array:
    """Return which rows have a finite prediction."""
    return np.asarray(np.isfinite(predicted).reshape(len(predicted), -1).all(axis=1))


def relative_loss_increase(
    evaluator: QualityEvaluator, original: Array, variant: Array, *, seed: int
) -> Interval:
    """Return the relative loss increase of the variant with its interval; losses by row are resampled in pairs."""
    random = np.random.default_rng(seed)
    count = len(original)
    shares = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        rows = random.integers(0, count, count)
        shares[number] = _share(evaluator, original[rows], variant[rows])
    low, high = np.quantile(shares, (0.025, 0.975))
    return Interval(low=float(low), middle=_share(evaluator, original, variant), high=float(high))


def _share(evaluator: QualityEvaluator, original: Array, variant: Array) -> float:
    before, after = evaluator.metric_value(original), evaluator.metric_value(variant)
    return (after - before) / max(before, TINY)


def _has_classes(predicted: Array) -> bool:
    return predicted.ndim == 2 and predicted.shape[1] > 2


def _positive(predicted: Array) -> Array:
    """Return the probability of the second class."""
    return predicted[:, -1] if predicted.ndim == 2 else predicted.reshape(len(predicted))


def _area(scores: Array, positive: Array) -> float:
    """Compute the area by ranks, with ties averaged."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    ones, zeros = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))
