"""Plan the export of a version: read its tensors from its file, lay its files out, and sign the list of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError

from falaj.errors import Conflict, Fault, Internal, InvalidInput
from falaj.governance.audit.verify import canonical
from falaj.ports.parsers import ByteSource, ParserPool
from falaj.records.governance.residency import Zone
from falaj.records.registry import (
    MANIFEST_FILE,
    SIGNATURE_FILE,
    ExportedFile,
    ExportTarget,
    FileFormat,
    ModelExport,
    ModelFile,
    ModelVersion,
    TensorSpec,
)
from falaj.registry.exports.edge import edge_layout
from falaj.registry.exports.kserve import NodeTerms, kserve_layout
from falaj.registry.exports.layout import ExportOptions, ExportSubject, Layout, TreeFacts, unsupported
from falaj.registry.exports.triton import triton_layout
from falaj.registry.signing.versions import SignedManifest, VersionSignatures

RECORD_FILE = "export.json"
KEY_FILE = "model.pub"
MODEL_TENSORS = "model_tensors"
"""The name of the parser, see assembly/parsing.py."""
TREES = (FileFormat.XGBOOST, FileFormat.LIGHTGBM)

ReadRange = Callable[[ModelFile, int, int], bytes]
"""Reads `length` bytes of a file from `offset`."""


def read_subject(
    version: ModelVersion, read: ReadRange, parsers: ParserPool, *, to: ExportTarget | None, owner: str
) -> ExportSubject:
    """Return the version with what its model file says of its tensors; the parser runs in a process without keys."""
    models = [file for file in version.files if file.format is version.format]
    if to is ExportTarget.FILES:  # nothing in its layout depends on tensors
        return ExportSubject(version=version, file=models[0])
    if len(models) != 1:
        raise InvalidInput.at(
            version.reference,
            given=f"{len(models)} files of format {version.format.value}",
            allowed="a version with one model file",
            fix="register each model as a version of its own",
        )
    (file,) = models
    if file.format not in (FileFormat.ONNX, *TREES):
        return ExportSubject(version=version, file=file, inputs=version.inputs, outputs=version.outputs)
    options = {"path": file.path, "format": file.format.value}
    content = ByteSource(file.size_bytes, partial(read, file))
    facts = parsers.parse(MODEL_TENSORS, [content], options, owner=owner).facts
    try:
        if file.format in TREES:
            return ExportSubject(version=version, file=file, trees=TreeFacts.model_validate(facts))
        inputs = _tensors(facts["inputs"], version.inputs)
        outputs = _tensors(facts["outputs"], version.outputs)
    except (KeyError, ValidationError):
        raise Internal("the parser of model tensors returned no tensors") from None
    subject = ExportSubject(version=version, file=file, inputs=inputs, outputs=outputs)
    _require_named(subject)
    return subject


def plan_export(
    subject: ExportSubject,
    signed: SignedManifest,
    signatures: VersionSignatures,
    *,
    to: ExportTarget,
    options: ExportOptions,
    zones: Sequence[Zone],
    node_terms: NodeTerms,
) -> ModelExport:
    """Return all files of the export, of which `model.sig` signs the others.

    The same version and options give the same bytes, but for signatures by keys in a token.
    """
    layout = _layout(subject, to=to, options=options, zones=zones, node_terms=node_terms)
    layout.texts[MANIFEST_FILE] = signed.text
    version = subject.version
    if to is ExportTarget.FILES:
        key, files, signature = signatures.key_of(signed), _files(layout), signed.signature
    else:
        key = signatures.newest_key()
        layout.texts[KEY_FILE] = key.pem
        files = _files(layout)
        files.append(_text_file(RECORD_FILE, _record(version, to, files)))
        signature = signatures.sign_files(version.reference, {file.path: file.sha256 for file in files})
    return ModelExport(
        version=version.reference,
        id=version.id,
        to=to,
        files=(*files, _text_file(SIGNATURE_FILE, signature)),
        label=version.label,
        notes=layout.notes,
        public_key=key.pem,
        fingerprint=key.fingerprint,
    )


def _files(layout: Layout) -> list[ExportedFile]:
    files = [*map(_text_file, layout.texts, layout.texts.values())]
    files += [
        ExportedFile(path=path, size_bytes=file.size_bytes, sha256=file.sha256, source=file.path)
        for path, file in layout.sources.items()
    ]
    files.sort(key=lambda file: file.path)
    _require_distinct(files)
    return files


def _record(version: ModelVersion, to: ExportTarget, files: Sequence[ExportedFile]) -> str:
    """Return what the export is, and its files with their sizes."""
    record = {
        "format": "falaj model export 2",
        "platform": version.platform,
        "version": version.reference,
        "id": version.id,
        "to": to.value,
        "label": version.label.describe(),
        "files": [each.model_dump(include={"path", "size_bytes", "sha256"}) for each in files],
    }
    return canonical(record).decode()


def _tensors(found: Sequence[dict[str, Any]], declared: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the tensors of the file, with the declared columns and, where the file has none, the declared shapes."""
    named = {tensor.name: tensor for tensor in declared}
    made = []
    for each in found:
        said = named.get(each["name"])
        shape = each["shape"] if each["shape"] is not None else None if said is None else said.shape
        if shape is None:
            raise InvalidInput.at(
                f"tensor {each['name']}",
                given="no shape, neither in the model file nor declared",
                allowed="a shape; -1 is a dimension of any size",
                fix="register the model with inputs= and outputs=, or write its shapes to the file",
            )
        features = () if said is None else said.features
        made.append(TensorSpec(name=each["name"], dtype=each["dtype"], shape=tuple(shape), features=features))
    return tuple(made)


def _layout(
    subject: ExportSubject,
    *,
    to: ExportTarget,
    options: ExportOptions,
    zones: Sequence[Zone],
    node_terms: NodeTerms,
) -> Layout:
    _require_meant(to, options)
    if to is ExportTarget.FILES:
        return Layout(texts={}, sources={file.path: file for file in subject.version.files})
    if to is ExportTarget.TRITON:
        return triton_layout(subject, options)
    if to is ExportTarget.EDGE:
        return edge_layout(subject)
    label = subject.version.label
    permitted = None if label.only is None else [z.name for z in zones if label.permits(z.jurisdiction)]
    return kserve_layout(subject, options, zones=permitted, node_terms=node_terms)


def _require_meant(to: ExportTarget, options: ExportOptions) -> None:
    """Raise InvalidInput for options that the target has no use for, with all of them."""
    default = ExportOptions()
    used = {
        ExportTarget.FILES: set(),
        ExportTarget.TRITON: {"gpus", "max_batch_rows"},
        ExportTarget.KSERVE: {"storage_uri", "cpus", "memory_bytes", "gpus", "max_batch_rows"},
        ExportTarget.EDGE: set(),
    }[to]
    faults = [
        Fault(where=name, given=str(value), allowed=f"not with {to.value}", fix="leave it out")
        for name, value in vars(options).items()
        if value != getattr(default, name) and name not in used
    ]
    if faults:
        raise InvalidInput(f"an export to {to.value} does not take these options", faults=faults)


def _require_named(subject: ExportSubject) -> None:
    for tensors in (subject.inputs, subject.outputs):
        names = [tensor.name for tensor in tensors]
        if "" in names or len(set(names)) < len(names):
            raise unsupported(
                subject, why="tensors without names, or with the same", allowed="a name for each"
            )


def _require_distinct(files: Sequence[ExportedFile]) -> None:
    """Raise Conflict if two files would be one on a disk that ignores case."""
    seen: dict[str, str] = {}
    for file in files:
        other = seen.setdefault(file.path.casefold(), file.path)
        if other is not file.path:
            raise Conflict(f"{file.path} and {other} would be one file where case does not count")


def _text_file(path: str, text: str) -> ExportedFile:
    content = text.encode()
    return ExportedFile(
        path=path, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest(), text=text
    )
