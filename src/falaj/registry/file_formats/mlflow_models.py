"""Read what MLflow writes beside a model: its flavours, and the packages that it was made with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from falaj.errors import InvalidInput, shorten
from falaj.ports.parsers import ByteSource, Parsed

MLMODEL, REQUIREMENTS = "MLmodel", "requirements.txt"
DESCRIPTION_LIMIT = 1 << 20
MOST_PACKAGES = 1000
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,198})==([A-Za-z0-9][A-Za-z0-9.!+_-]{0,198})")
FLAVOUR = re.compile(r"[a-z_]{1,40}")

SAFE_OPTIONS = {
    "sklearn": 'mlflow.sklearn.log_model(…, serialization_format="skops") of MLflow 3, or convert it to ONNX: '
    "mlflow.onnx.log_model",
    "pytorch": 'mlflow.pytorch.log_model(…, serialization_format="pt2", input_example=…) of MLflow 3, '
    "mlflow.onnx.log_model, or safetensors for weights alone",
    "lightgbm": "give mlflow.lightgbm.log_model the Booster (model.booster_), which is saved as text, "
    "or convert it to ONNX: mlflow.onnx.log_model",
    "xgboost": 'mlflow.xgboost.log_model(…, model_format="ubj")',
    "catboost": 'mlflow.catboost.log_model(…, format="cbm")',
    "keras": "convert it to ONNX: mlflow.onnx.log_model",
    "tensorflow": "convert it to ONNX: mlflow.onnx.log_model",
    "python_function": 'log the model as code: mlflow.pyfunc.log_model(python_model="model.py"), '
    "with its data as artifacts in a safe format",
}
"""By flavour, how MLflow's client saves a model without pickles. Most models have `python_function`, too."""


def parse_mlflow_model(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The parser of MLmodel and, if there is one, of requirements.txt: the flavours, and the pinned packages."""
    described, *others = [_text(source, options["where"]) for source in sources]
    try:
        found = yaml.safe_load(described)
        flavours = [name for name in found["flavors"] if FLAVOUR.fullmatch(name)]
    except (yaml.YAMLError, TypeError, KeyError, ValueError, RecursionError) as error:
        raise InvalidInput.at(
            options["where"], given=shorten(error), allowed="a description of a model, as MLflow writes it"
        ) from None
    pins = {
        match[1].lower().replace("_", "-").replace(".", "-"): (match[1], match[2])
        for text in others
        for line in text.splitlines()
        if (match := PIN.fullmatch(line.split(";")[0].strip()))
    }
    return Parsed({"flavours": flavours[:20], "packages": list(pins.values())[:MOST_PACKAGES]})


def safe_option(flavours: Sequence[str]) -> str | None:
    """Return how to log a model of these flavours without pickles; none where MLflow has no option for it."""
    own = [name for name in flavours if name != "python_function"]
    return next((SAFE_OPTIONS[name] for name in [*own, *flavours] if name in SAFE_OPTIONS), None)


def _text(source: ByteSource, where: str) -> str:
    if source.size_bytes > DESCRIPTION_LIMIT:
        raise InvalidInput.at(
            where, given=f"{source.size_bytes} bytes", allowed=f"at most {DESCRIPTION_LIMIT} bytes"
        )
    return source.read_range(0, source.size_bytes).decode(errors="replace")
