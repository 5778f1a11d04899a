"""An edge bundle: the files of a version, what they are, and a runner that needs one engine and no network."""

from __future__ import annotations

import json
from importlib.resources import files

from falaj.records.registry import FileFormat, TensorSpec
from falaj.registry.exports.layout import ROWS, ExportSubject, Layout, unsupported

ENGINES = {FileFormat.ONNX: "onnxruntime", FileFormat.LITERT: "ai-edge-litert"}
"""The package, as pip calls it, that runs a format."""
RUNNER = "edge_runner.py"


def edge_layout(subject: ExportSubject) -> Layout:
    """Return the bundle. Raise InvalidInput where the runner could not run the model."""
    version = subject.version
    engine = ENGINES.get(version.format)
    if engine is None:
        raise unsupported(subject, why="the runner has no engine for it", allowed="ONNX or LiteRT")
    _require_columns(subject)
    _require_rows(subject)
    signature = {
        "model": version.reference,
        "engine": engine,
        "file": f"files/{subject.file.path}",
        "inputs": [each.model_dump(mode="json") for each in subject.inputs],
        "outputs": [each.model_dump(mode="json") for each in subject.outputs],
    }
    texts = {
        "run.py": files("falaj.registry.exports.runtime").joinpath(RUNNER).read_text(),
        "signature.json": json.dumps(signature, indent=1, sort_keys=True) + "\n",
        "requirements.txt": f"numpy\n{engine}\n",
    }
    if version.card:
        texts["card.md"] = version.card
    sources = {f"files/{file.path}": file for file in version.files}
    return Layout(texts=texts, sources=sources)


def _require_rows(subject: ExportSubject) -> None:
    """Raise InvalidInput unless rows can be run one after the other: the first dimension is any size, or one."""
    allowed = "tensors whose first dimension is the rows (-1) or 1, of types that numpy has"
    for tensor in (*subject.inputs, *subject.outputs):
        if tensor.dtype == "bfloat16":
            raise unsupported(
                subject, why=f"{tensor.name} is bfloat16", allowed=allowed, fix="export it as float32"
            )
        if tensor in subject.inputs and tensor.shape[:1] not in ((ROWS,), (1,)):
            why = f"{tensor.name} is {list(tensor.shape)}"
            fix = "export the model with a dynamic first dimension: dynamic_shapes of torch.onnx.export"
            raise unsupported(subject, why=why, allowed=allowed, fix=fix)
        if tensor.features and len(tensor.features) != _width(tensor):
            why = f"{tensor.name} is {list(tensor.shape)}, and {len(tensor.features)} columns are named"
            raise unsupported(subject, why=why, allowed="one name for each column", fix="register it again")


def _require_columns(subject: ExportSubject) -> None:
    names = [name for tensor in subject.inputs for name in tensor.features]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not subject.inputs or not subject.outputs:
        fix = "register it with inputs= and outputs=, which LiteRT files are not read for"
        raise unsupported(subject, why="no inputs or outputs are known", allowed="a signature", fix=fix)
    if twice:
        fix = "register it again, with a name of its own for each column"
        raise unsupported(subject, why=f"the column {twice[0]} twice", allowed="each column once", fix=fix)


def _width(tensor: TensorSpec) -> int:
    """Return the columns of a tensor of rows; 1 where it has no further dimension."""
    return 1 if len(tensor.shape) < 2 else tensor.shape[1]
