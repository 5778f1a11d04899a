"""The formats of models that can be served, and the optional package that each of them needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec

from falaj.errors import Fault
from falaj.extras import missing_package
from falaj.records.registry import FileFormat, ModelVersion, TensorSpec
from falaj.records.serving.tensors import Datatype, Tensor

PACKAGES: Mapping[FileFormat, str | None] = {
    FileFormat.ONNX: None,
    FileFormat.TORCH_EXPORT: "torch",
    FileFormat.XGBOOST: "xgboost",
    FileFormat.LIGHTGBM: "lightgbm",
    FileFormat.LITERT: "ai_edge_litert",
    FileFormat.PYTHON: None,
    FileFormat.ENSEMBLE: None,
}
"""The optional package of each format that is served."""

FIXES: Mapping[FileFormat, str] = {
    FileFormat.CATBOOST: "convert it: fj.export_onnx(model, …), or save_model(path, format='onnx') of CatBoost",
    FileFormat.SKOPS: "convert it: fj.export_onnx(model, …), or skl2onnx; files of skops are kept, and not loaded",
    FileFormat.MLFLOW: "MLflow's client loads it; log the model as ONNX (mlflow.onnx.log_model), and register that",
    FileFormat.PICKLE: "loading it runs code: log the model as ONNX (mlflow.onnx.log_model), and register that",
    FileFormat.SAFETENSORS: "weights alone are no model: export it with torch.export.save or fj.export_onnx",
}

READS_OTHERS = frozenset({FileFormat.PYTHON})
"""The formats whose engines get the other files of a version, too."""

DATATYPES: Mapping[str, Datatype] = {
    "bool": Datatype.BOOL,
    "string": Datatype.BYTES,
    **{
        f"{sign}int{bits}": Datatype(f"{sign}INT{bits}".upper())
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    "float16": Datatype.FP16,
    "bfloat16": Datatype.BF16,
    "float32": Datatype.FP32,
    "float64": Datatype.FP64,
}
"""The datatypes of the Open Inference Protocol by the names that signatures use."""


def format_fault(version: ModelVersion) -> Fault | None:
    """Return why a version cannot be served by its format, and the fix; None if it can."""
    allowed = f"one model file of these formats: {', '.join(PACKAGES)}"
    if version.format not in PACKAGES:
        fix = FIXES.get(version.format) or (
            f"optimize or export it first: falaj models optimize {version.reference}, or fj.export_onnx"
        )
        return Fault(where=version.reference, given=str(version.format), allowed=allowed, fix=fix)
    models = [file for file in version.files if file.format is version.format]
    if len(models) == 1:
        return None
    return Fault(
        where=version.reference,
        given=f"{len(models)} files of the format {version.format}",
        allowed=allowed,
        fix="register each model under a name of its own",
    )


def require_installed(formats: Collection[FileFormat]) -> None:
    """Raise Unavailable, with the extra, if this installation lacks what a format needs."""
    for wanted in sorted(set(formats)):
        package = PACKAGES[wanted]
        if package is not None and find_spec(package) is None:
            raise missing_package(package, for_=f"a model of the format {wanted}")


def declared_tensors(specs: tuple[TensorSpec, ...]) -> tuple[Tensor, ...]:
    """Return the tensors of a registered signature as they are served."""
    return tuple(Tensor(name=spec.name, datatype=DATATYPES[spec.dtype], shape=spec.shape) for spec in specs)
