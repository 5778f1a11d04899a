"""Falaj: one sovereign ML platform, from a laptop to a cluster. `import falaj as fj`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from falaj.records.no_telemetry import NO_TELEMETRY
from falaj.version import VERSION

if TYPE_CHECKING:
    from falaj.errors import FalajError
    from falaj.governance.operations.caller import once
    from falaj.optimization.runtime.export import export_onnx, save_model
    from falaj.records.features import Aggregation, Entity, Feature, FeatureView
    from falaj.sdk.connection import connect
    from falaj.sdk.embedded import open_platform as open  # noqa: A004 - fj.open is the public name
    from falaj.sdk.platform import Platform
    from falaj.training.runtime.agent.job import job
    from falaj.training.runtime.callbacks import STOP
    from falaj.training.runtime.checkpointing.certificate import verify_certificate
    from falaj.training.runtime.custom_loop import step
    from falaj.training.runtime.fit import fit
    from falaj.training.runtime.memory.estimate import estimate

__version__ = VERSION

# Nothing leaves the host unasked: before any library that reports its use is imported.
for _name, _value in NO_TELEMETRY.items():
    os.environ.setdefault(_name, _value)

# torch.cuda.is_available() asks the driver then, and starts no CUDA: the children in which `fit` tries plans need it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_PUBLIC = {
    "Aggregation": ("falaj.records.features", "Aggregation"),
    "Entity": ("falaj.records.features", "Entity"),
    "FalajError": ("falaj.errors", "FalajError"),
    "Feature": ("falaj.records.features", "Feature"),
    "FeatureView": ("falaj.records.features", "FeatureView"),
    "Platform": ("falaj.sdk.platform", "Platform"),
    "STOP": ("falaj.training.runtime.callbacks", "STOP"),
    "connect": ("falaj.sdk.connection", "connect"),
    "estimate": ("falaj.training.runtime.memory.estimate", "estimate"),
    "export_onnx": ("falaj.optimization.runtime.export", "export_onnx"),
    "fit": ("falaj.training.runtime.fit", "fit"),
    "job": ("falaj.training.runtime.agent.job", "job"),
    "once": ("falaj.governance.operations.caller", "once"),
    "open": ("falaj.sdk.embedded", "open_platform"),
    "save_model": ("falaj.optimization.runtime.export", "save_model"),
    "step": ("falaj.training.runtime.custom_loop", "step"),
    "verify_certificate": ("falaj.training.runtime.checkpointing.certificate", "verify_certificate"),
}

__all__ = [
    "STOP",
    "Aggregation",
    "Entity",
    "FalajError",
    "Feature",
    "FeatureView",
    "Platform",
    "__version__",
    "connect",
    "estimate",
    "export_onnx",
    "fit",
    "job",
    "once",
    "open",
    "save_model",
    "step",
    "verify_certificate",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Load a public name at its first use."""
    from importlib import import_module

    if name not in _PUBLIC:
        raise AttributeError(f"falaj has no public name {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(import_module(module), attribute)
