"""An InferenceService of KServe, and the folder `model/` that its storage address has to hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from falaj.records.registry import FileFormat
from falaj.records.scheduling.cluster_names import dns_label
from falaj.registry.exports.layout import ExportOptions, ExportSubject, Layout, unsupported
from falaj.registry.exports.triton import triton_layout

NodeTerms = Callable[[Sequence[str] | None], list[dict[str, Any]]]
"""Returns node selector terms for the zones that are permitted (none: all), as the platform's cluster labels them."""

ALLOWED = "ONNX, XGBoost (JSON, UBJ) or LightGBM (text)"
UNSET = "unset://upload-the-folder-model-and-write-its-address-here"
"""An address of no scheme that KServe knows: its admission webhook refuses it, and names it."""
LONGEST_NAME = 40
"""KServe makes host names of the name, the namespace and words of its own, in one label of 63 characters."""
TREE_FILES = {"json": "model.json", "ubj": "model.ubj", "text": "model.bst"}
"""The file names that MLServer, which KServe runs for the V2 protocol, looks for."""


def kserve_layout(
    subject: ExportSubject, options: ExportOptions, *, zones: Sequence[str] | None, node_terms: NodeTerms
) -> Layout:
    """Return the InferenceService and its model. `zones` are those that the label permits (none: all)."""
    folder = _model_folder(subject, options)
    notes = list(folder.notes)
    if options.storage_uri is None:
        notes.append("upload the folder model/, and write its address to storageUri in inferenceservice.yaml")
    terms = node_terms(zones)
    if zones is not None and not terms:
        notes.append(
            f"the label is {subject.version.label.describe()}, and kubernetes.zones maps no node labels to zones, so "
            "that the InferenceService has no node affinity: apply it to a cluster that is there as a whole"
        )
    manifest = inference_service(subject, options, node_terms=terms)
    texts = {f"model/{path}": text for path, text in folder.texts.items()}
    return Layout(
        texts=texts | {"inferenceservice.yaml": yaml.safe_dump(manifest, sort_keys=False, width=1000)},
        sources={f"model/{path}": file for path, file in folder.sources.items()},
        notes=tuple(notes),
    )


def inference_service(
    subject: ExportSubject, options: ExportOptions, *, node_terms: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the InferenceService as KServe's API takes it."""
    version = subject.version
    model: dict[str, Any] = {
        "modelFormat": {"name": version.format.value},
        "protocolVersion": "v2",
        "storageUri": options.storage_uri or UNSET,
    }
    if limits := _resources(options):
        model["resources"] = {"requests": limits, "limits": limits}
    predictor: dict[str, Any] = {"model": model}
    if node_terms:
        required = {"nodeSelectorTerms": [*node_terms]}
        predictor["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": service_name(version.name),
            "annotations": {
                "falaj.dev/version": version.reference,
                "falaj.dev/version-id": str(version.id),
                "falaj.dev/sha256": subject.file.sha256,
                "falaj.dev/residency": version.label.describe(),
            },
        },
        "spec": {"predictor": predictor},
    }


def service_name(model: str) -> str:
    """Return the name of a model's InferenceService, which begins with a letter; no two models share one."""
    return dns_label(model if re.match("[a-z]", model) else f"model {model}", limit=LONGEST_NAME)


def _model_folder(subject: ExportSubject, options: ExportOptions) -> Layout:
    """Return what the storage address holds: a repository of Triton for ONNX, one file for MLServer."""
    if subject.version.format is FileFormat.ONNX:
        return triton_layout(subject, options)
    if subject.version.format in (FileFormat.XGBOOST, FileFormat.LIGHTGBM) and subject.trees is not None:
        if options.gpus:
            fix = "leave --gpus out, or export with --to triton, whose FIL back end runs on GPUs"
            raise unsupported(subject, why="MLServer runs it on CPUs", allowed="no GPUs", fix=fix)
        return Layout(texts={}, sources={TREE_FILES[subject.trees.layout]: subject.file})
    raise unsupported(subject, why="no runtime of KServe loads it by the V2 protocol", allowed=ALLOWED)


def _resources(options: ExportOptions) -> dict[str, str]:
    found: dict[str, str] = {}
    if options.cpus is not None:
        found["cpu"] = f"{round(options.cpus * 1000)}m"
    if options.memory_bytes is not None:
        found["memory"] = str(options.memory_bytes)
    if options.gpus:
        found["nvidia.com/gpu"] = str(options.gpus)
    return found
