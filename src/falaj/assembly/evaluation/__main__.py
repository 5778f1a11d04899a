"""`python -m falaj.assembly.evaluation SETTINGS…`: the job that computes the metrics of a model on a training set.

SETTINGS is a PredictionRun with a target as JSON, which may be cut into several arguments. The job predicts like a
batch prediction, with the same checkpoints, and writes metrics.json instead of the predictions.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from falaj.assembly.prediction import __main__ as prediction
from falaj.errors import FalajError, InvalidInput
from falaj.optimization.runtime.quality import choose_evaluator, finite_rows
from falaj.records.control.predictions import PredictionRun
from falaj.records.models.gates import EvaluationReport
from falaj.records.no_telemetry import NO_TELEMETRY

REPORT = "metrics.json"
"""The output of the job."""

Array = npt.NDArray[Any]


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 on success, 1 with the reason on standard error."""
    os.environ.update(NO_TELEMETRY)
    outputs = Path(os.environ["FALAJ_OUTPUTS"])
    try:
        run = PredictionRun.model_validate_json("".join(arguments))
        if prediction.run_job(run, _log_line) is None:
            return prediction.STOPPED_STATUS
        predictions = outputs / prediction.OUTPUT
        report = evaluate(predictions, target=str(run.target), prefix=run.columns.prefix)
        (outputs / REPORT).write_text(report.model_dump_json(indent=2))
        predictions.unlink()
    except FalajError as error:
        print(f"error[{error.code}] {error}", file=sys.stderr, flush=True)
        return 1
    shown = ", ".join(f"{name} {value:.6g}" for name, value in report.metrics.items())
    print(f"{run.model}: {shown}, over {report.rows} rows", flush=True)
    return 0


def evaluate(predictions: Path, *, target: str, prefix: str) -> EvaluationReport:
    """Return the metrics of the first output with fractions, else of the first with numbers, against `target`."""
    with pq.ParquetFile(predictions) as file:
        output = _scored_output(file.schema_arrow, prefix)
        table = file.read(columns=[target, output])
    labels = _numbers(table[target], where=f"column {target}")
    known = np.flatnonzero(np.isfinite(labels))
    if not len(known):
        raise InvalidInput.at(f"column {target}", given="no values", allowed="a number in some rows at least")
    predicted = _scores(table[output], where=output.removeprefix(prefix))[known]
    if not (good := finite_rows(predicted)).all():
        raise InvalidInput.at(
            output.removeprefix(prefix),
            given=f"no finite number for {int((~good).sum())} of {len(known)} rows",
            allowed="a finite prediction for each row: those that are left out would make the others look better",
        )
    found = choose_evaluator(labels[known], predicted).metric_values(predicted)
    return EvaluationReport(
        target=target,
        output=output.removeprefix(prefix),
        metrics={str(name): float(value) for name, value in found.items()},
        rows=len(known),
        skipped=len(labels) - len(known),
    )


def _scored_output(schema: pa.Schema, prefix: str) -> str:
    """Return the output that is scored, as for labels of online predictions: the first one with fractions."""
    kinds = {
        field.name: field.type.value_type if pa.types.is_list(field.type) else field.type
        for field in schema
        if field.name.startswith(prefix)
    }
    fractions = [name for name, kind in kinds.items() if pa.types.is_floating(kind)]
    numbers = [name for name, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_boolean(kind)]
    if not (fractions or numbers):
        shown = ", ".join(f"{name.removeprefix(prefix)} ({kind})" for name, kind in kinds.items())
        raise InvalidInput.at("outputs", given=shown, allowed="an output with numbers")
    return str((fractions or numbers)[0])


def _scores(column: pa.ChunkedArray, *, where: str) -> Array:
    """Return a prediction, or the predictions of a list, for each row."""
    if not pa.types.is_list(column.type):
        return _numbers(column, where=where)
    whole = column.combine_chunks()
    flat = _numbers(whole.flatten(), where=where)
    return flat.reshape(len(whole), -1)


def _numbers(column: Any, *, where: str) -> Array:
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise InvalidInput.at(where, given=str(kind), allowed="numbers or booleans")
    plain = column.cast(pa.float64(), safe=False).fill_null(float("nan"))
    return np.asarray(
        plain.to_numpy(zero_copy_only=False) if isinstance(plain, pa.Array) else plain.to_numpy()
    )


def _log_line(kind: str, content: Any) -> None:
    """Errors are written by `main`, and the progress is reported by the agent."""


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
