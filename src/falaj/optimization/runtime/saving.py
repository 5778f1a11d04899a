"""Leave the model that a job trained where the platform looks for it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from falaj.errors import InvalidInput
from falaj.optimization.runtime.export import ExportedModel, export_onnx

MODEL = "model/model.onnx"
DESCRIPTION = "model.json"


def save_model(
    model: Any,
    *,
    sample: Any,
    names: Sequence[str] | None = None,
    metrics: Mapping[str, float] | None = None,
    card: str = "",
) -> ExportedModel:
    """Export `model` to the job's outputs as ONNX, and describe it in model.json; outside a job, below ./outputs.

    What registers the model reads its inputs, outputs, `metrics` and `card` from there.
    """
    values = _finite(metrics or {})
    outputs = Path(os.environ.get("FALAJ_OUTPUTS") or "outputs")
    exported = export_onnx(model, outputs / MODEL, sample=sample, names=names)
    described = {
        "files": [MODEL],
        "inputs": [spec.model_dump(mode="json") for spec in exported.inputs],
        "outputs": [spec.model_dump(mode="json") for spec in exported.outputs],
        "metrics": values,
        "card": card,
    }
    staged = outputs / f".{DESCRIPTION}.{os.getpid()}"
    staged.write_text(json.dumps(described, indent=2))
    staged.replace(outputs / DESCRIPTION)
    return exported


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    values = {name: float(value) for name, value in metrics.items()}
    for name, value in values.items():
        if value != value or abs(value) == float("inf"):
            raise InvalidInput.at(f"metrics.{name}", given=value, allowed="a finite number")
    return values
