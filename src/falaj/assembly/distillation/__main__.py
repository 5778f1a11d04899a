"""`python -m falaj.assembly.distillation SETTINGS FEATURE…`: the training job that makes the student of a model.

The training runtime gives it checkpoints, resumption and metrics of its run. It writes student.json, and student.onnx
unless no student is good enough, to the outputs of the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from falaj.errors import FalajError
from falaj.optimization import hardware
from falaj.optimization.progress import VariantProgress
from falaj.optimization.runtime.candidates import open_original
from falaj.optimization.runtime.judged_rows import model_columns, read_fitting_rows
from falaj.optimization.runtime.recipes.recipe_input import SAMPLE_ROWS, RecipeInput, RecipeNotApplicable
from falaj.optimization.settings import OptimizationSettings, parse_settings
from falaj.records.optimization import StudentReport

REPORT, STUDENT = "student.json", "student.onnx"
EVALUATIONS = 10
CHECKPOINT_EVERY = timedelta(seconds=20)


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 on success, also without a student; 1 with the reason on standard error."""
    inputs, outputs = (
        Path(os.environ.get(f"FALAJ_{name.upper()}") or name) for name in ("inputs", "outputs")
    )
    try:
        train_student(parse_settings(arguments), inputs=inputs, outputs=outputs, log=_log)
    except FalajError as error:
        print(f"error[{error.code}] {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def train_student(
    settings: OptimizationSettings,
    *,
    inputs: Path,
    outputs: Path,
    run: Path | None = None,
    log: Callable[[str], None] = print,
) -> StudentReport:
    """Train students of the model in `inputs`, and write the one that is kept.

    The training is the run of this job, or that in the folder `run`, and resumes from its newest checkpoint.
    """
    try:
        report = _train(settings, inputs, outputs, run, log)
    except RecipeNotApplicable as error:
        report = StudentReport(refused=str(error)[:4000])
        log(VariantProgress(name="distill", stage="refused", reason=report.refused).line())
    outputs.mkdir(parents=True, exist_ok=True)
    (outputs / REPORT).write_text(report.model_dump_json(indent=2))
    return report


def _train(
    settings: OptimizationSettings,
    inputs: Path,
    outputs: Path,
    run: Path | None,
    log: Callable[[str], None],
) -> StudentReport:
    from falaj.optimization.runtime.recipes.distillation import RATE, Distillation
    from falaj.optimization.runtime.recipes.fine_tuning import BATCH
    from falaj.training.runtime.fit import fit

    original = open_original(inputs / "model")
    fitting, evaluator = read_fitting_rows(settings, original, inputs)
    given = RecipeInput(
        original,
        fitting.features[:SAMPLE_ROWS],
        fitting,
        evaluator,
        model_columns(settings, original),
        settings.budget,
        hardware.instruction_set(),
        seed=settings.seed,
        log=log,
    )
    distillation = Distillation(given)
    steps = distillation.steps
    log(f"training students on {len(fitting)} rows for {steps} steps")
    fit(
        distillation.students,
        distillation.loss,
        distillation.data,
        steps=steps,
        batch_size=BATCH,
        seed=settings.seed,
        optimizer="adam",
        lr=RATE,
        schedule="linear",
        tune="off",
        device="cpu",
        evaluate=distillation.evaluate,
        evaluate_every=max(1, steps // EVALUATIONS),
        checkpoint_every=CHECKPOINT_EVERY,
        run=run,
        progress=False,
    )
    kept = distillation.choose()
    outputs.mkdir(parents=True, exist_ok=True)
    (outputs / STUDENT).write_bytes(kept.content)
    log(VariantProgress(name="distill", stage="made", size_bytes=len(kept.content)).line())
    return StudentReport(width=kept.width, worse=kept.worse, steps=steps)


def _log(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
