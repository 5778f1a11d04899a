"""The rows of an optimization: those that judge the variants, and others that recipes learn from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from falaj.errors import InvalidInput
from falaj.optimization.runtime import quality
from falaj.optimization.runtime.candidates import Candidate, named_columns, require_width
from falaj.optimization.runtime.conversion.converted import Array
from falaj.optimization.runtime.evaluation_data import (
    MAX_FITTED_ROWS,
    MAX_ROWS,
    EvaluationRows,
    read_evaluation_rows,
    split_rows,
)
from falaj.optimization.runtime.quality import QualityEvaluator
from falaj.optimization.runtime.recipes.catalog import LEARNING
from falaj.optimization.settings import OptimizationSettings
from falaj.records.optimization import HeldOutRows

DATA, HELD_OUT = "data.parquet", "held_out.parquet"


@dataclass(frozen=True)
class JudgedRows:
    """The rows that judge the variants, the original's predictions for them, and the rows that recipes learn from."""

    rows: EvaluationRows
    predicted: Array
    fitting: EvaluationRows | None
    evaluator: QualityEvaluator
    held_out: HeldOutRows | None = None


def model_columns(settings: OptimizationSettings, original: Candidate) -> tuple[str, ...]:
    """Return the columns that the model takes: those of the settings, or of its own file."""
    return tuple(settings.features or (named_columns(original.content) if original.content else ()))


def read_judged_rows(settings: OptimizationSettings, original: Candidate, inputs: Path) -> JudgedRows:
    """Read the rows; those that recipes learn from are set aside, or are the data where a held-out set is given."""
    learns = bool(LEARNING & set(settings.recipes))
    fitting = None
    if settings.held_out:
        rows = _read(settings, original, inputs / HELD_OUT, MAX_ROWS)
        fitting = _read(settings, original, inputs / DATA, MAX_FITTED_ROWS) if learns else None
        total = rows.total
    else:
        rows = _read(settings, original, inputs / DATA, MAX_ROWS + MAX_FITTED_ROWS if learns else MAX_ROWS)
        total = rows.total
        if learns:
            fitting, rows = split_rows(rows, seed=settings.seed)
    require_width(original, rows.features)
    rows, predicted = _usable(original, rows)
    if fitting is not None:
        fitting, _ = _usable(original, fitting)
    evaluator = quality.choose_evaluator(rows.target, predicted, metric=settings.budget.metric)
    identified = HeldOutRows(
        part="held-out set" if settings.held_out else "part of the data" if learns else "data",
        rows=len(rows),
        total=total,
        seed=settings.seed,
        digest=digest_of(rows),
    )
    return JudgedRows(rows, predicted, fitting, evaluator, identified)


def read_fitting_rows(
    settings: OptimizationSettings, original: Candidate, inputs: Path
) -> tuple[EvaluationRows, QualityEvaluator]:
    """Return the rows that recipes learn from, as `read_judged_rows` does, and an evaluator; those that judge are not
    read where they are a set of their own."""
    if settings.held_out:
        rows = _read(settings, original, inputs / DATA, MAX_FITTED_ROWS)
    else:
        rows, _ = split_rows(
            _read(settings, original, inputs / DATA, MAX_ROWS + MAX_FITTED_ROWS), seed=settings.seed
        )
    require_width(original, rows.features)
    rows, predicted = _usable(original, rows)
    return rows, quality.choose_evaluator(rows.target, predicted, metric=settings.budget.metric)


def digest_of(rows: EvaluationRows) -> str:
    """Return the SHA-256 of the numbers of rows, with their types and shapes."""
    found = hashlib.sha256()
    for array in (rows.features, rows.target):
        found.update(f"{array.dtype.str} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def _read(settings: OptimizationSettings, original: Candidate, path: Path, most: int) -> EvaluationRows:
    return read_evaluation_rows(
        path,
        features=model_columns(settings, original),
        target=settings.target,
        shape=original.input,
        most=most,
        seed=settings.seed,
    )


def _usable(original: Candidate, rows: EvaluationRows) -> tuple[EvaluationRows, Array]:
    """Return the rows for which the original predicts a finite number, and its predictions."""
    predicted = quality.predict_all(original.predict, rows.features)
    if len(predicted) != len(rows.target):
        raise InvalidInput.at("model", given=f"{len(predicted)} scores", allowed="a score for each row")
    good = quality.finite_rows(predicted)
    if not good.any():
        raise InvalidInput(
            "the model predicts no finite number for any row; if values are missing, impute them before the model"
        )
    skipped = rows.skipped + int((~good).sum())
    return EvaluationRows(rows.features[good], rows.target[good], skipped, rows.total), predicted[good]
