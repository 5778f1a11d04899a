"""Which module opens which format, and what has to be installed for it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from falaj.errors import Unavailable
from falaj.records.registry import FileFormat
from falaj.records.serving import ServedFile
from falaj.serving.runtime.engines.opened import ModelContents, OpenedModel
from falaj.serving.runtime.formats import EXTRAS

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
    """Import the engine of a file's format, and with it the framework. Raise Unavailable if that is not installed."""
    try:
        module = import_module(f"falaj.serving.runtime.engines.{MODULES[file.format]}")
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"{file.model}@{file.version} has the format {file.format}, and the model server has no package "
            f"{error.name}: pip install 'falaj[{EXTRAS[file.format]}]'"
        ) from None
    opener: Opener = module.open_model
    return opener
