"""Falaj: one sovereign ML platform, from a laptop to a cluster. `import falaj as fj`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from falaj.records.no_telemetry import NO_TELEMETRY
from falaj.version import VERSION

if TYPE_CHECKING:
    from falaj.errors import FalajError
    from falaj.governance.audit.verify import verify_export
    from falaj.governance.operations.caller import once
    from falaj.optimization.runtime.export import export_onnx, save_model
    from falaj.records.control.pipelines import Canary, CanaryTraffic
    from falaj.records.control.predictions import PredictionColumns
    from falaj.records.features import Aggregation, Entity, Feature, FeatureView
    from falaj.records.monitoring.monitors import MonitorWindow
    from falaj.records.monitoring.sketches import FalseAlarmBudget
    from falaj.records.optimization import AcceptanceBudget
    from falaj.records.serving.lookups import Lookup, ViewLookup
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
    "AcceptanceBudget": ("falaj.records.optimization", "AcceptanceBudget"),
    "Aggregation": ("falaj.records.features", "Aggregation"),
    "Canary": ("falaj.records.control.pipelines", "Canary"),
    "CanaryTraffic": ("falaj.records.control.pipelines", "CanaryTraffic"),
    "Entity": ("falaj.records.features", "Entity"),
    "FalajError": ("falaj.errors", "FalajError"),
    "FalseAlarmBudget": ("falaj.records.monitoring.sketches", "FalseAlarmBudget"),
    "Feature": ("falaj.records.features", "Feature"),
    "FeatureView": ("falaj.records.features", "FeatureView"),
    "Lookup": ("falaj.records.serving.lookups", "Lookup"),
    "MonitorWindow": ("falaj.records.monitoring.monitors", "MonitorWindow"),
    "Platform": ("falaj.sdk.platform", "Platform"),
    "PredictionColumns": ("falaj.records.control.predictions", "PredictionColumns"),
    "STOP": ("falaj.training.runtime.callbacks", "STOP"),
    "ViewLookup": ("falaj.records.serving.lookups", "ViewLookup"),
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
    "verify_export": ("falaj.governance.audit.verify", "verify_export"),
}

__all__ = [
    "STOP",
    "AcceptanceBudget",
    "Aggregation",
    "Canary",
    "CanaryTraffic",
    "Entity",
    "FalajError",
    "FalseAlarmBudget",
    "Feature",
    "FeatureView",
    "Lookup",
    "MonitorWindow",
    "Platform",
    "PredictionColumns",
    "ViewLookup",
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
    "verify_export",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Load a public name at its first use."""
    from importlib import import_module

    if name not in _PUBLIC:
        raise AttributeError(f"falaj has no public name {name!r}")
    from falaj.extras import requiring_packages

    module, attribute = _PUBLIC[name]
    with requiring_packages(for_=f"fj.{name}"):
        return getattr(import_module(module), attribute)
