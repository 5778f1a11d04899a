"""The optional packages: which extra has each of them, and the error if one is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from falaj.errors import Unavailable

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "gpu": {"pynvml": "nvidia-ml-py"},
    "hsm": {"pkcs11": "python-pkcs11"},
    "kubernetes": {"lightkube": "lightkube", "httpx2": "httpx2"},
    "litert": {"ai_edge_litert": "ai-edge-litert", "flatbuffers": "flatbuffers"},
    "openvino": {"openvino": "openvino"},
    "torch": {"torch": "torch", "onnxscript": "onnxscript"},
    "trees": {
        "sklearn": "scikit-learn",
        "skl2onnx": "skl2onnx",
        "xgboost": "xgboost-cpu",
        "lightgbm": "lightgbm",
        "onnxmltools": "onnxmltools",
    },
    "tuning": {"optuna": "optuna", "cmaes": "cmaes"},
}
"""The modules of each extra of pyproject.toml, and the packages that have them; the first stands for the extra."""


def extra_of(module: str) -> str | None:
    """Return the extra that has a module; none if it is not optional, or not Falaj's."""
    name = module.partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if name in modules), None)


def how_to_install(module: str) -> str:
    """Return the command that installs a module."""
    extra = extra_of(module)
    return f"pip install {module.partition('.')[0]}" if extra is None else f"pip install 'falaj[{extra}]'"


def missing_package(module: str, *, for_: str) -> Unavailable:
    """Return the error for a module that is not installed."""
    from falaj.errors import Unavailable  # it needs pydantic, which the environment of a job may lack

    return Unavailable(f"{for_} needs the package {module.partition('.')[0]}: {how_to_install(module)}")


@contextmanager
def requiring_packages(*, for_: str) -> Iterator[None]:
    """Raise Unavailable, with the command that installs it, if a module that is imported here is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "falaj":
            raise
        raise missing_package(error.name, for_=for_) from error
