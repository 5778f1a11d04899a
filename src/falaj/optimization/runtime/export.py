"""Export a trained model to ONNX, and check that the file predicts what the model does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from falaj.errors import Fault, InvalidInput, Unavailable
from falaj.optimization.runtime import samples
from falaj.optimization.runtime.conversion.converted import Array, ConvertedModel, framework_of
from falaj.records.registry import TensorSpec

TOLERANCE = 1e-4
"""How far a prediction may be from the model's own: this much, or this share of it where it is beyond 1."""


@dataclass(frozen=True)
class ExportedModel:
    """The file, what it takes and gives, and how far it was from the model on the sample at most."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_difference: float
    rows: int


def export_onnx(
    model: Any,
    path: str | Path,
    *,
    sample: Any,
    names: Sequence[str] | None = None,
    tolerance: float = TOLERANCE,
) -> ExportedModel:
    """Write `model` to `path` as ONNX: a torch module or exported program, a scikit-learn estimator, or XGBoost.

    The file has one input, `features`, of as many rows as are sent. A classifier of two classes answers the probability
    of the second as one column; of more, a column each. `sample` is rows that the model takes; the file must agree with
    the model on them. `names` are the columns of the sample, unless it or the model knows them.
    """
    kind = framework_of(model)
    rows = samples.rows_of(sample, any_shape=kind == "torch")
    columns = samples.column_names(names, sample, model, rows)
    try:
        converted = _convert(kind, model, rows, columns)
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"an export of {kind} needs the package {error.name}: pip install 'falaj[serve,torch,trees]'"
        ) from error
    difference = _agreement(converted, rows, tolerance=tolerance)
    target = Path(path)
    _write(target, converted.content)
    inputs = tuple(spec.model_copy(update={"features": columns}) for spec in converted.inputs)
    return ExportedModel(target, inputs, converted.outputs, difference, len(rows))


def _convert(kind: str, model: Any, rows: Array, columns: tuple[str, ...]) -> ConvertedModel:
    """Each framework is imported only for its own models."""
    if kind == "torch":
        from falaj.optimization.runtime.conversion import from_torch

        return from_torch.convert(model, rows, columns)
    if kind == "xgboost":
        from falaj.optimization.runtime.conversion import from_xgboost

        return from_xgboost.convert(model, rows, columns)
    from falaj.optimization.runtime.conversion import from_sklearn

    return from_sklearn.convert(model, rows, columns)


def _agreement(converted: ConvertedModel, rows: Array, *, tolerance: float) -> float:
    """The largest difference on the sample, all rows at once and the first one alone; refused beyond `tolerance`."""
    from falaj.optimization.runtime.sessions import open_session

    session = open_session(converted.content)
    name = session.get_inputs()[0].name
    worst = 0.0
    for part, references in ((rows, converted.references), (rows[:1], [r[:1] for r in converted.references])):
        try:
            outputs = session.run(None, {name: part})
        except Exception as error:  # onnxruntime raises a dozen types that share no parent but this
            raise _disagrees(
                f"{len(part)} rows", f"an error: {error}", "any number of rows", fix=converted.batch_fix
            ) from error
        for spec, output, reference in zip(converted.outputs, outputs, references, strict=True):
            worst = max(worst, _difference(spec.name, output, reference, tolerance))
    return worst


def _difference(name: str, output: Array, reference: Array, tolerance: float) -> float:
    if output.shape != reference.shape:
        raise _disagrees(f"output {name}", f"shape {list(output.shape)}", f"shape {list(reference.shape)}")
    wanted, made = reference.astype(np.float64), output.astype(np.float64)
    one_is_nan = np.isnan(wanted) != np.isnan(made)
    gap = np.where(np.isnan(wanted) | (wanted == made), 0.0, np.abs(made - wanted))
    gap[one_is_nan] = np.inf
    beyond = gap > tolerance * np.maximum(1.0, np.abs(np.nan_to_num(wanted)))
    if beyond.any():
        place = tuple(int(i) for i in np.unravel_index(np.argmax(gap), gap.shape))
        raise _disagrees(
            f"output {name} at {list(place)}",
            f"{made[place]:.6g} ({int(beyond.any(axis=tuple(range(1, gap.ndim))).sum())} of {len(gap)} rows differ)",
            f"{wanted[place]:.6g}, as the model predicts, within {tolerance:g}",
            fix="trees behind a scaler often differ, as their thresholds are rounded: train them on plain columns",
        )
    return float(gap.max(initial=0.0))


def _disagrees(where: str, given: str, allowed: str, *, fix: str | None = None) -> InvalidInput:
    return InvalidInput(
        "the exported model does not predict what the model does; nothing was written",
        faults=[Fault(where=where, given=given, allowed=allowed, fix=fix)],
    )


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_bytes(content)
    staged.replace(path)
