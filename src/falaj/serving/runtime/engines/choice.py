"""Which module opens which format, and what has to be installed for it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from falaj.errors import InvalidInput
from falaj.extras import requiring_packages
from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import ServedFile
from falaj.serving.runtime.engines.opened import ModelContents, OpenedModel

MODULES = {
    FileFormat.TORCH_EXPORT: "torch_export",
    FileFormat.XGBOOST: "xgboost",
    FileFormat.LIGHTGBM: "lightgbm",
    FileFormat.LITERT: "litert",
    FileFormat.PYTHON: "python_code",
}
"""The modules beside this one; ONNX has its own way, since some of its models run in the server's process."""

Opener = Callable[[ServedFile, ModelContents], OpenedModel]


def find_opener(file: ServedFile) -> Opener:
    """Import the engine of a file, and with it the framework. Raise Unavailable if that is not installed."""
    with requiring_packages(for_=f"{file.model}@{file.version}, which has the format {file.format},"):
        module = import_module(f"falaj.serving.runtime.engines.{_engine(file)}")
    opener: Opener = module.open_model
    return opener


def _engine(file: ServedFile) -> str:
    """Return the module of a file's engine."""
    if file.settings.engine != "openvino":
        return MODULES[file.format]
    if file.format is not FileFormat.ONNX:
        raise InvalidInput(
            f"{file.model}@{file.version} has the format {file.format}, and OpenVINO runs ONNX models here; "
            "falaj endpoints configure NAME --engine auto"
        )
    return "openvino"
