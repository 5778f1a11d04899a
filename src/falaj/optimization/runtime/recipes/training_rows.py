"""The rows that a recipe trains with, and those that it chooses between settings by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from falaj.optimization.runtime import quality
from falaj.optimization.runtime.conversion.converted import Array
from falaj.optimization.runtime.evaluation_data import EvaluationRows
from falaj.optimization.runtime.quality import QualityEvaluator
from falaj.optimization.runtime.recipes.recipe_input import RecipeInput
from falaj.records.optimization import HIGHER_IS_BETTER

CHECKED_SHARE = 0.2
"""Share of the rows to learn from that training does not see: it chooses between settings by them."""
MARGIN = 0.5
"""Share of the budget that a setting may use up on the rows to check by: other rows decide, by an interval."""


@dataclass(frozen=True)
class TrainingRows:
    """Rows to train with and rows to check by, with what the original predicts for them."""

    trained: EvaluationRows
    teacher: Array
    checked: EvaluationRows
    reference: Array
    evaluator: QualityEvaluator

    def leaves_margin(self, predict: Callable[[Array], Array], given: RecipeInput) -> bool:
        """Tell whether a model is far enough within the budget on the rows to check by."""
        return self.shortfall(predict, given) <= MARGIN * given.budget.worse

    def shortfall(self, predict: Callable[[Array], Array], given: RecipeInput) -> float:
        """Return by how much the budget's metric is worse than the original's on the rows to check by."""
        judge = self.evaluator.of_rows(self.checked.target)
        made = quality.predict_all(predict, self.checked.features).reshape(self.reference.shape)
        before, after = judge.score(self.reference).metric_value(), judge.score(made).metric_value()
        worse = before - after if judge.metric in HIGHER_IS_BETTER else after - before
        return worse / max(before, quality.TINY) if given.budget.relative else worse


def training_rows(given: RecipeInput) -> TrainingRows:
    """Split the rows to learn from."""
    rows = given.rows
    order = np.random.default_rng(given.seed).permutation(len(rows))
    checked = max(1, round(CHECKED_SHARE * len(rows)))
    held, used = rows.take(order[:checked]), rows.take(order[checked:])
    predict = given.original.predict
    return TrainingRows(
        used,
        quality.predict_all(predict, used.features),
        held,
        quality.predict_all(predict, held.features),
        given.evaluator,
    )
