"""The job: open the original, make the variants, measure them side by side, judge, and write the report."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from falaj.errors import InvalidInput
from falaj.optimization.runtime import quality, timing
from falaj.optimization.runtime.conversion import Array
from falaj.optimization.runtime.recipes import CannotMake, make_variant
from falaj.optimization.runtime.rows import Rows, read_rows
from falaj.optimization.runtime.sessions import open_session, tensor_specs
from falaj.optimization.runtime.subjects import (
    Subject,
    named_columns,
    onnx_subject,
    open_original,
    require_width,
)
from falaj.optimization.settings import Settings
from falaj.optimization.verdicts import decide
from falaj.records.optimization import Measurement, OptimizationReport, OptimizationVerdict, Recipe, Variant
from falaj.records.registry import TensorSpec

Say = Callable[[str], None]
SAMPLE_ROWS = 512
"""Rows on which an export is checked."""
REPORT = "report.json"


@dataclass(frozen=True)
class Judged:
    """The losses and scores of a subject on the rows."""

    losses: Array
    loss: float
    auc: float | None


def optimize(settings: Settings, *, inputs: Path, outputs: Path, say: Say = print) -> OptimizationReport:
    """Do all of it; what comes of it lies in `outputs`: report.json and variants/<recipe>/model.onnx."""
    original = open_original(inputs / "model")
    features = settings.features or (named_columns(original.content) if original.content else ())
    rows = read_rows(inputs / "data.parquet", features=features, target=settings.target, seed=settings.seed)
    require_width(original, rows.features)
    rows, predicted = _usable(original, rows)
    judge = quality.choose_judge(rows.target, predicted)
    say(f"judging by {judge.metric} on {len(rows.target)} rows, {rows.skipped} skipped")
    before = _judged(judge, predicted)
    made, refused = _make(settings, original, rows.features[:SAMPLE_ROWS], tuple(features), outputs, say)
    timed = timing.time_in_turns(
        {each.name: each.predict for each in (original, *made)},
        rows.features,
        on_round=lambda number: say(f"timed {number} rounds") if number % 10 == 0 else None,
    )
    variants = [
        _judge_variant(settings, judge, before, each, rows, timed, columns=tuple(features)) for each in made
    ] + refused
    for each in variants:
        say(f"{each.recipe} {each.verdict}: {each.reason}")
    report = OptimizationReport(
        metric=judge.metric,
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
    """This machine in words."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} processors, {platform.system()}"


def _usable(original: Subject, rows: Rows) -> tuple[Rows, Array]:
    """The rows for which the original itself predicts a number, and what it predicts."""
    predicted = quality.predict_all(original.predict, rows.features)
    if len(predicted) != len(rows.target):
        raise InvalidInput.at("model", given=f"{len(predicted)} scores", allowed="a score for each row")
    good = quality.finite_rows(predicted)
    if not good.any():
        raise InvalidInput(
            "the model predicts no number for any row; if values are missing, fill them before the model"
        )
    skipped = rows.skipped + int((~good).sum())
    return Rows(rows.features[good], rows.target[good], skipped), predicted[good]


def _make(
    settings: Settings, original: Subject, sample: Array, columns: tuple[str, ...], outputs: Path, say: Say
) -> tuple[list[Subject], list[Variant]]:
    """The variants that could be made, written down, and those that could not."""
    made, refused = [], []
    for recipe in dict.fromkeys(settings.recipes):
        try:
            content = make_variant(recipe, original, sample=sample, names=columns)
            subject = onnx_subject(recipe, content)
        except CannotMake as error:
            refused.append(
                Variant(recipe=recipe, verdict=OptimizationVerdict.REFUSED, reason=str(error)[:4000])
            )
            continue
        path = outputs / _file(recipe)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        made.append(subject)
        say(f"made {recipe}: {len(content)} bytes")
    return made, refused


def _judged(judge: quality.Judge, predicted: Array) -> Judged:
    losses = judge.losses(predicted)
    return Judged(losses, judge.summed_up(losses), judge.auc(predicted))


def _judge_variant(
    settings: Settings,
    judge: quality.Judge,
    before: Judged,
    subject: Subject,
    rows: Rows,
    timed: dict[str, timing.Timed],
    *,
    columns: tuple[str, ...],
) -> Variant:
    recipe, times = cast(Recipe, subject.name), timed[subject.name]
    speedup = timing.speedups(timed["original"], times, seed=settings.seed)
    inputs, outputs = _tensors(subject, columns)
    facts: dict[str, Any] = {
        "recipe": recipe,
        "speedup": speedup,
        "file": _file(recipe),
        "inputs": inputs,
        "outputs": outputs,
    }
    predicted = quality.predict_all(subject.predict, rows.features)
    wrong = int((~quality.finite_rows(predicted)).sum())
    if wrong:
        reason = f"it predicts no number for {wrong} rows for which the original does"
        bare = _measurement(subject, times, None)
        return Variant(verdict=OptimizationVerdict.REFUSED, reason=reason, measured=bare, **facts)
    after = _judged(judge, predicted)
    worse = quality.share_worse(judge, before.losses, after.losses, seed=settings.seed)
    served = {name: speedup[name] for name in timing.SERVED}
    verdict, reason = decide(served, worse, budget=settings.budget, metric=judge.metric)
    measured = _measurement(subject, times, after)
    return Variant(verdict=verdict, reason=reason, measured=measured, worse=worse, **facts)


def _measurement(subject: Subject, timed: timing.Timed, judged: Judged | None) -> Measurement:
    return Measurement(
        latency_p50_us=timed.percentile(1, 0.5) * 1e6,
        latency_p99_us=timed.percentile(1, 0.99) * 1e6,
        rows_per_s_32=32 / timed.median(32),
        rows_per_s_256=256 / timed.median(256),
        cpu_us_per_row=timed.processor_median(256) / 256 * 1e6,
        size_bytes=subject.size_bytes,
        loss=None if judged is None else judged.loss,
        auc=None if judged is None else judged.auc,
    )


def _tensors(
    subject: Subject, columns: tuple[str, ...]
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    session = open_session(subject.content or b"")
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
