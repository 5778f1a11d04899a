"""Optimization of five models: the accepted variant beside the fp32 ONNX model, and how honest the verdicts are.

Each model is trained for seconds on synthetic rows, its variants are made once, and they are measured and judged in
several repetitions. Two impostors are among them: a copy of the fp32 ONNX model, which must never be accepted as
faster, and a fast variant that is slightly outside the quality budget. What is accepted is checked against rows that
the job has not seen, and against the median speed of all repetitions. The claim is about variants of the model itself:
a distilled student counts only where nothing else was accepted, as synthetic rows are easy for small networks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness import Result, Rule, report, say

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "optimization"))
import networks

from falaj.assembly.distillation.__main__ import STUDENT, train_student
from falaj.optimization.budgets import parse_budget
from falaj.optimization.runtime import job, latency, quality
from falaj.optimization.runtime.candidates import Candidate
from falaj.optimization.settings import OptimizationSettings
from falaj.records.optimization import (
    HIGHER_IS_BETTER,
    OptimizationReport,
    OptimizationVerdict,
    Recipe,
)

GOAL = 1.3
REPETITIONS = 20
FRESH_ROWS = 10_000
"""Rows that no job has seen, to check what was accepted."""
RECIPES: tuple[Recipe, ...] = (
    "onnx",
    "int8",
    "int8-static",
    "fp16",
    "bf16",
    "prune-structured",
    "distill",
)
COPY: Recipe = "litert"
OUTSIDE: Recipe = "prune-unstructured"
IMPOSTORS: dict[Recipe, str] = {COPY: "copy of onnx", OUTSIDE: "slightly outside the budget"}
"""The names of unused recipes that the impostors are measured under."""
EXCESS = 1.5
"""How many times the budget the second impostor is worse."""


@dataclass(frozen=True)
class BenchmarkedModel:
    """A model to optimize: its rows, its budget, and how it is trained and saved."""

    name: str
    rows: Callable[..., Any]
    save: Callable[[Any, Path], None]
    budget: str
    count: int


@dataclass
class Tally:
    """What came of the repetitions of one model."""

    verdicts: int = 0
    accepted: dict[Recipe, int] = field(default_factory=dict)
    speedups: dict[Recipe, list[float]] = field(default_factory=dict)
    """Against the fp32 ONNX model, the better of one row and the best batch."""
    rates: dict[Recipe, list[float]] = field(default_factory=dict)
    reasons: dict[Recipe, str] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--models", default=",".join(each.name for each in MODELS))
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="to measure each candidate in a repetition"
    )
    options = parser.parse_args()
    latency.LIMIT_S = options.seconds
    job.measure_memory = lambda path, batch: (
        None
    )  # it starts a process for each model, and is no part of a verdict
    chosen = [each for each in MODELS if each.name in options.models.split(",")]
    results, totals = [], dict.fromkeys(("verdicts", "slower", "outside", "copies", "spoiled"), 0)
    for model in chosen:
        with tempfile.TemporaryDirectory() as folder:
            results.append(run_model(model, Path(folder), options.repetitions, totals))
    counted = totals["verdicts"]
    for what, name in (
        ("accepted variants that are slower than fp32 ONNX, of all verdicts", "slower"),
        ("accepted variants outside the quality budget on fresh rows, of all verdicts", "outside"),
        ("copies of the fp32 ONNX model accepted as faster, of all verdicts", "copies"),
        ("variants made slightly worse than the budget and accepted, of all verdicts", "spoiled"),
    ):
        results.append(Result(what, totals[name], counted, 0, Rule.FALAJ_AT_MOST))
    report("optimization", results)


def run_model(model: BenchmarkedModel, folder: Path, repetitions: int, totals: dict[str, int]) -> Result:
    """Train, make the variants once, judge them again and again; return the claim about speed."""
    say(f"{model.name}: training")
    inputs, outputs = folder / "in", folder / "out"
    (inputs / "model").mkdir(parents=True)
    model.save(model.rows(model.count, seed=1), inputs / "model")
    write_rows(model.rows(model.count, seed=2), inputs / "data.parquet")
    settings = OptimizationSettings(
        target="target", features=("row",), recipes=RECIPES, budget=parse_budget(model.budget), training_s=45
    )
    student = train_student(settings, inputs=inputs, outputs=folder / "student", log=_quiet)
    if student.refused:
        settings = settings.model_copy(update={"no_student": student.refused[:1000]})
    else:
        (folder / "student" / STUDENT).rename(inputs / STUDENT)
    prepared = job.prepare(settings, inputs=inputs, outputs=outputs, log=_quiet)
    prepared = replace(prepared, made=(*prepared.made, *impostors(prepared)))
    tally = Tally()
    for number in range(repetitions):
        say(f"{model.name}: repetition {number + 1} of {repetitions}")
        seeded = replace(prepared, settings=settings.model_copy(update={"seed": number}))
        count(tally, job.judge(seeded, log=_quiet))
    truth = fresh_worsening(prepared, model)
    show(model, tally, truth, repetitions)
    genuine = [each for each in tally.accepted if each not in IMPOSTORS and each != "onnx"]
    totals["verdicts"] += tally.verdicts
    totals["slower"] += sum(tally.accepted[e] for e in genuine if np.median(tally.speedups[e]) < 1)
    limit = settings.budget.worse
    totals["outside"] += sum(tally.accepted[each] for each in genuine if truth[each] > limit)
    totals["copies"] += tally.accepted.get(COPY, 0)
    totals["spoiled"] += tally.accepted.get(OUTSIDE, 0)
    kept = [each for each in genuine if each != "distill"] or genuine
    best = max(kept, key=lambda each: float(np.median(tally.speedups[each])), default=None)
    base = float(np.median(tally.rates["onnx"]))
    gain = 1.0 if best is None else float(np.median(tally.speedups[best]))
    what = f"{model.name}: {best or 'nothing'} beside fp32 ONNX, speed at 1 row or at the best batch"
    return Result(what, base * gain, base, GOAL, Rule.RATIO_AT_LEAST)


def impostors(prepared: job.PreparedVariants) -> list[Candidate]:
    """Return a copy of the fp32 ONNX model, and a fast variant whose scores are spoiled for some rows."""
    made = {each.name: each for each in prepared.made}
    if "onnx" not in made:
        return []
    copied = job.onnx_candidate(COPY, made["onnx"].content or b"", path=made["onnx"].path)
    fastest = min(
        made.values(), key=lambda each: latency._quickest(each.predict, prepared.judged.rows.features[:32])
    )
    share = spoiled_share(prepared)

    def predict(rows: Any) -> Any:
        scores = fastest.predict(rows)
        first = np.abs(rows.reshape(len(rows), -1)[:, :3].astype(np.float64)).sum(axis=1)
        chosen = (
            (first * 7919.0) % 1.0 < share if rows.dtype.kind == "f" else (first * 0.6180339887) % 1.0 < share
        )
        return np.where(chosen.reshape(-1, *[1] * (scores.ndim - 1)), spoil(scores), scores)

    return [copied, replace(fastest, name=OUTSIDE, predict=predict, path=None)]


def spoiled_share(prepared: job.PreparedVariants) -> float:
    """Return the share of rows to spoil so that the metric is EXCESS times the budget worse."""
    judge, budget = prepared.judged.evaluator, prepared.settings.budget
    before = judge.score(prepared.judged.predicted).metric_value()
    loss = budget.worse * (before if budget.relative else 1.0) * EXCESS
    gained = 2 * before - 1 if judge.metric == "auc" else before
    return float(loss / max(gained, 1e-3))


def spoil(scores: Any) -> Any:
    """Return scores that choose another class."""
    return 1 - scores if scores.shape[-1] == 1 or scores.ndim == 1 else -scores


def count(tally: Tally, found: OptimizationReport) -> None:
    base = next((each.measured for each in found.variants if each.recipe == "onnx"), None) or found.original
    for each in found.variants:
        if each.measured is None:
            tally.reasons[each.recipe] = each.reason
            continue
        tally.verdicts += 1
        one = base.latency_p50_us / each.measured.latency_p50_us
        tally.speedups.setdefault(each.recipe, []).append(
            max(one, each.measured.rows_per_s / base.rows_per_s)
        )
        tally.rates.setdefault(each.recipe, []).append(each.measured.rows_per_s)
        if each.verdict is OptimizationVerdict.ACCEPTED:
            tally.accepted[each.recipe] = tally.accepted.get(each.recipe, 0) + 1
        if each.verdict is OptimizationVerdict.REFUSED or each.recipe not in tally.reasons:
            tally.reasons[each.recipe] = each.reason


def fresh_worsening(prepared: job.PreparedVariants, model: BenchmarkedModel) -> dict[str, float]:
    """Return by how much each variant is worse than the original on rows that nobody has seen."""
    rows = model.rows(FRESH_ROWS if model.rows is not networks.image_rows else FRESH_ROWS // 4, seed=3)
    features = prepared.original.input.reshape(rows.features.reshape(len(rows.target), -1))
    judge = prepared.judged.evaluator.of_rows(rows.target.astype(float))
    before = judge.score(quality.predict_all(prepared.original.predict, features)).metric_value()
    found = {}
    for each in prepared.made:
        predicted = quality.predict_all(each.predict, features)
        shaped = predicted.reshape(len(features), *prepared.judged.predicted.shape[1:])
        after = judge.score(shaped).metric_value()
        worse = before - after if judge.metric in HIGHER_IS_BETTER else after - before
        found[each.name] = worse / before if prepared.settings.budget.relative else worse
    return found


def write_rows(rows: Any, path: Path) -> None:
    flat = rows.features.reshape(len(rows.target), -1)
    values = pa.array(flat.ravel())
    lists = pa.FixedSizeListArray.from_arrays(values, flat.shape[1])
    pq.write_table(pa.table({"row": lists, "target": rows.target}), path)


def save_network(name: str, epochs: int) -> Callable[[Any, Path], None]:
    def save(rows: Any, folder: Path) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        trained = networks.train(networks.NETWORKS[name][0](), rows, epochs=epochs)
        networks.save_export(trained, rows, folder / "model.pt2")

    return save


def save_trees(rows: Any, folder: Path) -> None:
    from xgboost import XGBClassifier

    trained = XGBClassifier(n_estimators=400, max_depth=6, learning_rate=0.1, n_jobs=1)
    trained.fit(rows.features, rows.target)
    (folder / "model.json").write_bytes(bytes(trained.get_booster().save_raw("json")))


def show(model: BenchmarkedModel, tally: Tally, truth: dict[str, float], repetitions: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "variant",
        "accepted",
        "× fp32 ONNX",
        "worse on fresh rows",
        "why",
        title=f"{model.name}: {model.budget}",
    )
    for recipe, reason in tally.reasons.items():
        times = tally.speedups.get(recipe)
        table.add_row(
            IMPOSTORS.get(recipe, recipe),
            f"{tally.accepted.get(recipe, 0)} of {repetitions}",
            "-" if times is None else f"{np.median(times):.2f}",
            f"{truth[recipe]:+.4f}" if recipe in truth else "-",
            reason,
        )
    Console(stderr=True, width=160).print(table)


def _quiet(_: str) -> None:
    return None


MODELS = (
    BenchmarkedModel("mlp", networks.tabular_rows, save_network("mlp", 4), "auc -0.01", 12_000),
    BenchmarkedModel("mobilenet", networks.image_rows, save_network("mobilenet", 3), "accuracy -0.02", 2000),
    BenchmarkedModel(
        "efficientnet", networks.image_rows, save_network("efficientnet", 3), "accuracy -0.02", 2000
    ),
    BenchmarkedModel("transformer", networks.token_rows, save_network("transformer", 3), "auc -0.01", 6000),
    BenchmarkedModel("boosted tree", networks.tabular_rows, save_trees, "auc -0.01", 12_000),
)


if __name__ == "__main__":
    main()
