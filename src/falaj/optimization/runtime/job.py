"""The optimization job: open the original, make the variants, measure them side by side, and write the report."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from falaj.errors import InvalidInput
from falaj.optimization.acceptance import decide_acceptance
from falaj.optimization.runtime import latency, quality
from falaj.optimization.runtime.candidates import (
    Candidate,
    named_columns,
    onnx_candidate,
    open_original,
    require_width,
)
from falaj.optimization.runtime.conversion.converted import Array
from falaj.optimization.runtime.evaluation_data import EvaluationRows, read_evaluation_rows
from falaj.optimization.runtime.recipes import RecipeNotApplicable, make_variant
from falaj.optimization.runtime.sessions import open_session, tensor_specs
from falaj.optimization.settings import OptimizationSettings
from falaj.records.optimization import Measurement, OptimizationReport, OptimizationVerdict, Recipe, Variant
from falaj.records.registry import TensorSpec

Log = Callable[[str], None]
SAMPLE_ROWS = 512
"""Rows on which an export is verified."""
REPORT = "report.json"


@dataclass(frozen=True)
class QualityScores:
    """The losses and scores of a candidate on the evaluation rows."""

    losses: Array
    loss: float
    auc: float | None


def optimize(
    settings: OptimizationSettings, *, inputs: Path, outputs: Path, log: Log = print
) -> OptimizationReport:
    """Run the job and write report.json and variants/<recipe>/model.onnx to `outputs`."""
    original = open_original(inputs / "model")
    features = settings.features or (named_columns(original.content) if original.content else ())
    rows = read_evaluation_rows(
        inputs / "data.parquet", features=features, target=settings.target, seed=settings.seed
    )
    require_width(original, rows.features)
    rows, predicted = _usable(original, rows)
    evaluator = quality.choose_evaluator(rows.target, predicted)
    log(f"evaluating {evaluator.metric} on {len(rows.target)} rows, {rows.skipped} skipped")
    before = _quality_scores(evaluator, predicted)
    made, refused = _make(settings, original, rows.features[:SAMPLE_ROWS], tuple(features), outputs, log)
    timed = latency.measure_interleaved(
        {each.name: each.predict for each in (original, *made)},
        rows.features,
        on_round=lambda number: log(f"timed {number} rounds") if number % 10 == 0 else None,
    )
    variants = [
        _evaluate_variant(settings, evaluator, before, each, rows, timed, columns=tuple(features))
        for each in made
    ] + refused
    for each in variants:
        log(f"{each.recipe} {each.verdict}: {each.reason}")
    report = OptimizationReport(
        metric=evaluator.metric,
        rows=len(rows.target),
        skipped_rows=rows.skipped,
        host=host(),
        original=_measurement(original, timed["original"], before),
        variants=tuple(sorted(variants, key=lambda each: settings.recipes.index(each.recipe))),
    )
    outputs.mkdir(parents=True, exist_ok=True)
    (outputs / REPORT).write_text(report.model_dump_json(indent=2))
    return report


def host() -> str:
    """Describe this machine."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} processors, {platform.system()}"


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
    return EvaluationRows(rows.features[good], rows.target[good], skipped), predicted[good]


def _make(
    settings: OptimizationSettings,
    original: Candidate,
    sample: Array,
    columns: tuple[str, ...],
    outputs: Path,
    log: Log,
) -> tuple[list[Candidate], list[Variant]]:
    """Make and write the variants; return them and the recipes that are not applicable."""
    made, refused = [], []
    for recipe in dict.fromkeys(settings.recipes):
        try:
            content = make_variant(recipe, original, sample=sample, names=columns)
            candidate = onnx_candidate(recipe, content)
        except RecipeNotApplicable as error:
            refused.append(
                Variant(recipe=recipe, verdict=OptimizationVerdict.REFUSED, reason=str(error)[:4000])
            )
            continue
        path = outputs / _file(recipe)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        made.append(candidate)
        log(f"made {recipe}: {len(content)} bytes")
    return made, refused


def _quality_scores(evaluator: quality.QualityEvaluator, predicted: Array) -> QualityScores:
    losses = evaluator.losses(predicted)
    return QualityScores(losses, evaluator.metric_value(losses), evaluator.auc(predicted))


def _evaluate_variant(
    settings: OptimizationSettings,
    evaluator: quality.QualityEvaluator,
    before: QualityScores,
    candidate: Candidate,
    rows: EvaluationRows,
    timed: dict[str, latency.LatencySamples],
    *,
    columns: tuple[str, ...],
) -> Variant:
    recipe, times = cast(Recipe, candidate.name), timed[candidate.name]
    speedup = latency.speedups(timed["original"], times, seed=settings.seed)
    inputs, outputs = _tensors(candidate, columns)
    facts: dict[str, Any] = {
        "recipe": recipe,
        "speedup": speedup,
        "file": _file(recipe),
        "inputs": inputs,
        "outputs": outputs,
    }
    predicted = quality.predict_all(candidate.predict, rows.features)
    wrong = int((~quality.finite_rows(predicted)).sum())
    if wrong:
        reason = f"it predicts no finite number for {wrong} rows for which the original does"
        bare = _measurement(candidate, times, None)
        return Variant(verdict=OptimizationVerdict.REFUSED, reason=reason, measured=bare, **facts)
    after = _quality_scores(evaluator, predicted)
    worse = quality.relative_loss_increase(evaluator, before.losses, after.losses, seed=settings.seed)
    served = {name: speedup[name] for name in latency.SERVED}
    verdict, reason = decide_acceptance(served, worse, budget=settings.budget, metric=evaluator.metric)
    measured = _measurement(candidate, times, after)
    return Variant(verdict=verdict, reason=reason, measured=measured, worse=worse, **facts)


def _measurement(
    candidate: Candidate, timed: latency.LatencySamples, scores: QualityScores | None
) -> Measurement:
    return Measurement(
        latency_p50_us=timed.percentile(1, 0.5) * 1e6,
        latency_p99_us=timed.percentile(1, 0.99) * 1e6,
        rows_per_s_32=32 / timed.median(32),
        rows_per_s_256=256 / timed.median(256),
        cpu_us_per_row=timed.processor_median(256) / 256 * 1e6,
        size_bytes=candidate.size_bytes,
        loss=None if scores is None else scores.loss,
        auc=None if scores is None else scores.auc,
    )


def _tensors(
    candidate: Candidate, columns: tuple[str, ...]
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    session = open_session(candidate.content or b"")
    inputs = tensor_specs(session.get_inputs())
    named = tuple(spec.model_copy(update={"features": columns}) for spec in inputs)
    return named, tensor_specs(session.get_outputs())


def _file(recipe: Recipe) -> str:
    return f"variants/{recipe}/model.onnx"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
