"""The optimization job: open the original, make the variants, measure them side by side, and write the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np

from falaj.errors import FalajError
from falaj.optimization import hardware
from falaj.optimization.acceptance import decide_acceptance
from falaj.optimization.progress import ORIGINAL, VariantProgress, VariantStage
from falaj.optimization.runtime import gpu, latency, quality
from falaj.optimization.runtime.candidates import Candidate, litert_candidate, onnx_candidate, open_original
from falaj.optimization.runtime.conversion.converted import Array
from falaj.optimization.runtime.judged_rows import JudgedRows, model_columns, read_judged_rows
from falaj.optimization.runtime.memory import measure_memory
from falaj.optimization.runtime.recipes.catalog import make_variant
from falaj.optimization.runtime.recipes.recipe_input import (
    SAMPLE_ROWS,
    RecipeInput,
    RecipeNotApplicable,
    VariantFile,
)
from falaj.optimization.settings import OptimizationSettings
from falaj.records.optimization import (
    Interval,
    Measurement,
    OptimizationReport,
    OptimizationVerdict,
    QualityMetric,
    Recipe,
    Variant,
)
from falaj.records.registry import TensorSpec

Log = Callable[[str], None]
REPORT = "report.json"
STUDENT = "student"
"""The input with the student that a training job has made."""
CONTROL, ONNX_CONTROL = "control", "onnx control"
"""Second copies of the original and of its ONNX export: how much faster they seem is noise."""
BESIDE = {CONTROL: ORIGINAL, ONNX_CONTROL: "onnx"}
"""What each of these copies; it is measured at the same batch sizes."""
ON_GPU = "original on the GPU"


@dataclass(frozen=True)
class PreparedVariants:
    """The candidates of a job, and the recipes that made none; `beside` is the original once more, and on the GPU."""

    settings: OptimizationSettings
    columns: tuple[str, ...]
    judged: JudgedRows
    original: Candidate
    made: tuple[Candidate, ...]
    refused: tuple[Variant, ...]
    beside: tuple[Candidate, ...]
    gpu_name: str


def optimize(
    settings: OptimizationSettings, *, inputs: Path, outputs: Path, log: Log = print
) -> OptimizationReport:
    """Run the job and write report.json and variants/<recipe>/model.onnx to `outputs`."""
    report = judge(prepare(settings, inputs=inputs, outputs=outputs, log=log), log=log)
    outputs.mkdir(parents=True, exist_ok=True)
    (outputs / REPORT).write_text(report.model_dump_json(indent=2))
    return report


def prepare(
    settings: OptimizationSettings, *, inputs: Path, outputs: Path, log: Log = print
) -> PreparedVariants:
    """Open the original, read the rows, and make the variants."""
    original = open_original(inputs / "model")
    columns = model_columns(settings, original)
    judged = read_judged_rows(settings, original, inputs)
    log(
        f"evaluating {judged.evaluator.metric} on {len(judged.rows)} rows, {judged.rows.skipped} skipped, "
        f"{0 if judged.fitting is None else len(judged.fitting)} others to learn from"
    )
    student = _student(inputs)
    made, refused = _make(settings, original, judged, columns, student, outputs, log)
    beside, gpu_name = _originals(original, inputs / "model")
    if original.content is None:
        exports = (each for each in made if each.name == "onnx")
        beside += [onnx_candidate(ONNX_CONTROL, each.content or b"") for each in exports]
    return PreparedVariants(
        settings, columns, judged, original, tuple(made), tuple(refused), tuple(beside), gpu_name
    )


def judge(prepared: PreparedVariants, *, log: Log = print) -> OptimizationReport:
    """Measure the candidates side by side, and accept or refuse each variant."""
    settings, judged, original = prepared.settings, prepared.judged, prepared.original
    timed = _measure([original, *prepared.beside, *prepared.made], judged.rows.features, log)
    noise: dict[str, dict[str, Interval]] = {
        ORIGINAL: latency.speedups(timed[ORIGINAL], timed[CONTROL], seed=settings.seed)
    }
    if ONNX_CONTROL in timed:
        noise["onnx"] = latency.speedups(timed["onnx"], timed[ONNX_CONTROL], seed=settings.seed)
    measuring = Measuring(settings, judged, timed, noise, prepared.columns)
    variants = [*measuring.variants(prepared.made), *prepared.refused]
    for each in variants:
        _tell_verdict(log, each, judged.evaluator.metric)
    on_gpu = [each for each in prepared.beside if each.name == ON_GPU]
    order = dict.fromkeys([*settings.recipes, *(each.recipe for each in variants)])
    return OptimizationReport(
        metric=judged.evaluator.metric,
        rows=len(judged.rows),
        fitted_rows=0 if judged.fitting is None else len(judged.fitting),
        skipped_rows=judged.rows.skipped,
        held_out=judged.held_out,
        host=hardware.host_name(),
        instruction_set=hardware.instruction_set(),
        gpu=prepared.gpu_name,
        noise=noise[ORIGINAL],
        original=measuring.measurement(original, judged.predicted),
        on_gpu=measuring.measurement(on_gpu[0], judged.predicted) if on_gpu else None,
        variants=tuple(sorted(variants, key=lambda each: [*order].index(each.recipe))),
    )


def _make(
    settings: OptimizationSettings,
    original: Candidate,
    judged: JudgedRows,
    columns: tuple[str, ...],
    student: bytes | None,
    outputs: Path,
    log: Log,
) -> tuple[list[Candidate], list[Variant]]:
    """Make and write the variants; return them and the recipes that are not applicable."""
    given = RecipeInput(
        original,
        judged.rows.features[:SAMPLE_ROWS],
        judged.fitting,
        judged.evaluator,
        columns,
        settings.budget,
        hardware.instruction_set(),
        seed=settings.seed,
        training_s=settings.training_s,
        student=student,
        no_student=settings.no_student,
        log=log,
    )
    made, refused = [], []
    for recipe in dict.fromkeys(settings.recipes):
        log(VariantProgress(name=recipe, stage="making").line())
        try:
            candidate = _written(recipe, make_variant(recipe, given), judged.rows.features, outputs)
        except RecipeNotApplicable as error:
            reason = str(error)[:4000]
            refused.append(Variant(recipe=recipe, verdict=OptimizationVerdict.REFUSED, reason=reason))
            continue
        made.append(candidate)
        log(VariantProgress(name=recipe, stage="made", size_bytes=candidate.size_bytes).line())
    return made, refused


def _student(inputs: Path) -> bytes | None:
    """Return the student that a training job has made; None if there is none."""
    for path in sorted(inputs.glob(f"{STUDENT}*")):
        return path.read_bytes()
    return None


def _written(recipe: Recipe, file: VariantFile, features: Array, outputs: Path) -> Candidate:
    """Write the file of a variant, and open it. Raise RecipeNotApplicable if it does not answer."""
    path = outputs / _file(recipe, file.suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.content)
    try:
        if file.suffix == ".tflite":
            found = litert_candidate(recipe, file.content, path=path)
        elif file.suffix == ".pt2":
            found = gpu.open_half(recipe, path)
        else:
            provider = gpu.CUDA if file.device == "gpu" else "CPUExecutionProvider"
            found = onnx_candidate(recipe, file.content, path=path, provider=provider)
        found.predict(features[:1])
        found.predict(features[:2])
    except Exception as error:  # each framework has its own
        path.unlink()
        reason = "; ".join(str(error).strip().splitlines()[:3])
        raise RecipeNotApplicable(f"the variant was made, but does not answer: {reason}") from error
    return found


def _originals(original: Candidate, folder: Path) -> tuple[list[Candidate], str]:
    """Return the original once more, to know the noise; also on the GPU where there is one, and the GPU's name."""
    beside = [replace(open_original(folder), name=CONTROL)]
    name = gpu.device_name()
    if name is not None:
        try:
            beside.append(replace(gpu.open_on_gpu(original), name=ON_GPU))
        except (gpu.NotOnGpu, FalajError) as error:
            return beside, f"{name}: {error}"[:4000]
    return beside, name or ""


def _measure(candidates: list[Candidate], features: Array, log: Log) -> dict[str, latency.LatencySamples]:
    models = {each.name: each.predict for each in candidates}

    def tell(name: str) -> None:
        if name != ON_GPU:
            log(VariantProgress(name=name, stage="measuring").line())

    best = latency.find_best_batches(
        {name: predict for name, predict in models.items() if name not in BESIDE},
        features,
        largest={each.name: latency.LARGEST_GPU_BATCH for each in candidates if each.device == "gpu"},
        on_model=tell,
    )
    best |= {name: best[copied] for name, copied in BESIDE.items() if name in models}
    timed = latency.measure_interleaved(
        models,
        features,
        best=best,
        on_round=lambda number: log(f"timed {number} rounds") if number % 10 == 0 else None,
    )
    for each in candidates:
        if each.name not in (*BESIDE, ON_GPU):
            samples = timed[each.name]
            log(
                VariantProgress(
                    name=each.name,
                    stage="measured",
                    latency_p50_us=samples.percentile(1, 0.5) * 1e6,
                    rows_per_s=samples.best / samples.median(samples.best),
                    best_batch=samples.best,
                    size_bytes=each.size_bytes,
                ).line()
            )
    return timed


@dataclass(frozen=True)
class Measuring:
    """What was measured of all candidates, to be reported and judged one by one."""

    settings: OptimizationSettings
    judged: JudgedRows
    timed: dict[str, latency.LatencySamples]
    noise: dict[str, dict[str, Interval]]
    columns: tuple[str, ...]

    def variants(self, made: Sequence[Candidate]) -> list[Variant]:
        """Return the variants with their verdicts; others must be faster than an ONNX export that was accepted."""
        found = [self.variant(each, ORIGINAL) for each in made if each.name == "onnx"]
        accepted = any(each.verdict is OptimizationVerdict.ACCEPTED for each in found)
        for each in made:
            if each.name != "onnx":
                found.append(self.variant(each, "onnx" if accepted and each.device == "cpu" else ORIGINAL))
        return found

    def variant(self, candidate: Candidate, baseline: Literal["original", "onnx"]) -> Variant:
        """Return the variant with its verdict."""
        recipe, judged, settings = cast(Recipe, candidate.name), self.judged, self.settings
        speedup = latency.speedups(self.timed[baseline], self.timed[recipe], seed=settings.seed)
        predicted = quality.predict_all(candidate.predict, judged.rows.features)
        wrong = int((~quality.finite_rows(predicted)).sum())
        worse = None
        if wrong:
            verdict = OptimizationVerdict.REFUSED
            reason = f"it predicts no finite number for {wrong} rows for which the original does"
        elif predicted.size != judged.predicted.size:
            verdict = OptimizationVerdict.REFUSED
            reason = f"it gives {predicted.size} scores where the original gives {judged.predicted.size}"
            wrong = 1
        else:
            predicted = predicted.reshape(judged.predicted.shape)
            before, after = judged.evaluator.score(judged.predicted), judged.evaluator.score(predicted)
            worse = quality.worsening(before, after, budget=settings.budget, seed=settings.seed)
            verdict, reason = decide_acceptance(
                speedup,
                worse,
                budget=settings.budget,
                metric=judged.evaluator.metric,
                noise=self.noise.get(baseline) or self.noise[ORIGINAL],
                served=(latency.SINGLE, latency.SERVED),
                than="the original" if baseline == ORIGINAL else "its ONNX export",
            )
        return Variant(
            recipe=recipe,
            device=candidate.device,
            compared_with=baseline,
            verdict=verdict,
            reason=reason,
            measured=self.measurement(candidate, None if wrong else predicted),
            speedup=speedup,
            worse=worse,
            file=_file(recipe, candidate.path.suffix if candidate.path else ".onnx"),
            inputs=_named(candidate.inputs, self.columns),
            outputs=candidate.outputs,
        )

    def measurement(self, candidate: Candidate, predicted: Array | None) -> Measurement:
        timed = self.timed[candidate.name]
        values = {} if predicted is None else self.judged.evaluator.metric_values(predicted)
        batch = np.resize(self.judged.rows.features, (timed.best, *self.judged.rows.features.shape[1:]))
        on_cpu = candidate.path is not None and candidate.device == "cpu"
        return Measurement(
            latency_p50_us=timed.percentile(1, 0.5) * 1e6,
            latency_p99_us=timed.percentile(1, 0.99) * 1e6,
            rows_per_s_32=latency.SERVED_ROWS / timed.median(latency.SERVED_ROWS),
            rows_per_s=timed.best / timed.median(timed.best),
            best_batch=timed.best,
            cpu_us_per_row=timed.processor_median(timed.best) / timed.best * 1e6,
            size_bytes=candidate.size_bytes,
            memory_bytes=measure_memory(candidate.path, batch) if on_cpu and candidate.path else None,
            loss=values.get("log_loss", values.get("rmse")),
            auc=values.get("auc"),
            accuracy=values.get("accuracy"),
        )


def _named(inputs: tuple[TensorSpec, ...], columns: tuple[str, ...]) -> tuple[TensorSpec, ...]:
    """Return the inputs with the names of their columns."""
    return tuple(spec.model_copy(update={"features": columns}) for spec in inputs)


def _tell_verdict(log: Log, variant: Variant, metric: QualityMetric) -> None:
    found = variant.measured
    quality_value = None
    if found is not None:
        quality_value = {"auc": found.auc, "accuracy": found.accuracy}.get(metric, found.loss)
    stage: VariantStage = "accepted" if variant.verdict is OptimizationVerdict.ACCEPTED else "refused"
    log(
        VariantProgress(
            name=variant.recipe,
            stage=stage,
            latency_p50_us=None if found is None else found.latency_p50_us,
            rows_per_s=None if found is None else found.rows_per_s,
            best_batch=None if found is None else found.best_batch,
            size_bytes=None if found is None else found.size_bytes,
            quality=quality_value,
            reason=variant.reason,
        ).line()
    )


def _file(recipe: Recipe, suffix: str) -> str:
    return f"variants/{recipe}/model{suffix}"
