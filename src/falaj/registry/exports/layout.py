"""What is exported, and what a layout makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from falaj.errors import Fault, InvalidInput
from falaj.records.record import Record
from falaj.records.registry import FileFormat, ModelFile, ModelVersion, TensorSpec

ROWS = -1
"""A dimension of any size; the first one of a tensor is its rows."""


class TreeFacts(Record):
    """What a tree model's file says of itself; `features` is None where it was not found, `classes` 1 without any."""

    layout: str
    features: int | None
    classes: int
    objective: str | None = None
    booster: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExportSubject:
    """A version, its model file, and the tensors or the facts that were read from that file."""

    version: ModelVersion
    file: ModelFile
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    trees: TreeFacts | None = None

    @property
    def has_rows(self) -> bool:
        """Tell whether the first dimension of every tensor is of any size, and so may be a batch."""
        return all(tensor.shape[:1] == (ROWS,) for tensor in (*self.inputs, *self.outputs))


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How the export is to be served; 0 rows: without batching."""

    storage_uri: str | None = None
    cpus: float | None = None
    memory_bytes: int | None = None
    gpus: int = 0
    max_batch_rows: int = 64


@dataclass(frozen=True)
class Layout:
    """The files of an export by path: texts, and files of the version; and what is left to do."""

    texts: dict[str, str]
    sources: dict[str, ModelFile]
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    """Besides the files, what the signed record of the export says."""


CONVERT = {
    FileFormat.TORCH_EXPORT: "export the module to ONNX (fj.save_model in its job, or `falaj models optimize`)",
    FileFormat.SAFETENSORS: "save the whole model as ONNX: fj.save_model in the job that trains it",
    FileFormat.LITERT: "export it as an edge bundle (--to edge), or register the model as ONNX",
    FileFormat.XGBOOST: "convert it to ONNX with fj.export_onnx, or `falaj models optimize`, and register that",
    FileFormat.LIGHTGBM: "convert it to ONNX (onnxmltools.convert_lightgbm), and register that",
    FileFormat.ENSEMBLE: "export the versions of its steps, one by one",
    FileFormat.SKOPS: "convert it to ONNX (fj.export_onnx, or skl2onnx), and register that",
    FileFormat.MLFLOW: "export its files (--to files), which MLflow's client loads; or register the model as ONNX",
    FileFormat.PICKLE: "export its files (--to files); or convert the model to ONNX, and register that",
    FileFormat.CATBOOST: 'save it as ONNX (model.save_model(path, format="onnx")), and register that',
}


def unsupported(subject: ExportSubject, *, why: str, allowed: str, fix: str | None = None) -> InvalidInput:
    """Return the error for a version that a layout cannot hold: why, what it can hold, and the way there."""
    fault = Fault(
        where=f"{subject.version.reference}: {subject.file.path}",
        given=f"{subject.version.format.value}; {why}" if why else subject.version.format.value,
        allowed=allowed,
        fix=fix or CONVERT.get(subject.version.format),
    )
    return InvalidInput(f"{subject.version.reference} cannot be exported so", faults=[fault])
