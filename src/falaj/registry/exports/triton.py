"""A model repository of NVIDIA Triton: `NAME/config.pbtxt` and `NAME/NUMBER/` with the model."""

from __future__ import annotations

from collections.abc import Iterator

from falaj.records.registry import FileFormat, TensorSpec
from falaj.registry.exports.layout import ExportOptions, ExportSubject, Layout, TreeFacts, unsupported

ALLOWED = "ONNX, or gbtree models of XGBoost (JSON, UBJ) and LightGBM (text)"
DATA_TYPES = {
    "bool": "TYPE_BOOL",
    "string": "TYPE_STRING",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
}
TREE_FILES = {
    (FileFormat.XGBOOST, "json"): ("xgboost_json", "xgboost.json"),
    (FileFormat.XGBOOST, "ubj"): ("xgboost_ubj", "xgboost.ubj"),
    (FileFormat.LIGHTGBM, "text"): ("lightgbm", "model.txt"),
}
"""The model type of the FIL back end, and the file name that it looks for, by format and layout."""
BINARY = ("binary:logistic", "binary:hinge", "binary", "cross_entropy")
MULTICLASS = ("multi:softprob", "multi:softmax", "multiclass", "multiclassova")
QUEUE_DELAY_US = 100
"""How long Triton waits for further rows of a batch."""


def triton_layout(subject: ExportSubject, options: ExportOptions) -> Layout:
    """Return a model repository. Raise InvalidInput where Triton cannot run the model from such a file."""
    version = subject.version
    if version.format is FileFormat.ONNX:
        file_name, lines = "model.onnx", [*_onnx(subject, options)]
    elif version.format in (FileFormat.XGBOOST, FileFormat.LIGHTGBM) and subject.trees is not None:
        file_name, lines = _trees(subject, subject.trees, options)
    elif version.format is FileFormat.TORCH_EXPORT:
        why = "the PyTorch back end of Triton loads TorchScript, or what AOTInductor compiled for one machine"
        raise unsupported(subject, why=why, allowed=ALLOWED)
    else:
        raise unsupported(subject, why="no back end of Triton loads it", allowed=ALLOWED)
    head = [
        f"# {version.reference}, {version.id}, sha256 {subject.file.sha256}",
        f"# residency: {version.label.describe()}",
        f"name: {quoted(version.name)}",
    ]
    return Layout(
        texts={f"{version.name}/config.pbtxt": "\n".join([*head, *lines, *_instances(options), ""])},
        sources={f"{version.name}/{version.number}/{file_name}": subject.file},
    )


def quoted(text: str) -> str:
    """Return a string of protobuf's text format; what is not plain ASCII becomes octal, byte by byte."""
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in text.encode()
    )
    return f'"{"".join(plain)}"'


def _onnx(subject: ExportSubject, options: ExportOptions) -> Iterator[str]:
    batched = subject.has_rows and options.max_batch_rows > 0
    yield 'backend: "onnxruntime"'
    yield 'platform: "onnxruntime_onnx"'
    yield from _batching(options.max_batch_rows if batched else 0)
    for direction, tensors in (("input", subject.inputs), ("output", subject.outputs)):
        for tensor in tensors:
            yield from _tensor(direction, tensor, skipped=1 if batched else 0)


def _batching(rows: int) -> Iterator[str]:
    yield f"max_batch_size: {rows}"
    if rows:
        yield f"dynamic_batching {{ max_queue_delay_microseconds: {QUEUE_DELAY_US} }}"


def _tensor(direction: str, tensor: TensorSpec, *, skipped: int) -> Iterator[str]:
    """Yield one tensor, without its first `skipped` dimensions; Triton wants at least one, and reshapes it away."""
    dims = tensor.shape[skipped:]
    yield f"{direction} {{"
    yield f"  name: {quoted(tensor.name)}"
    yield f"  data_type: {DATA_TYPES[tensor.dtype]}"
    yield f"  dims: [ {', '.join(map(str, dims or (1,)))} ]"
    if not dims:
        yield "  reshape { shape: [ ] }"
    yield "}"


def _trees(subject: ExportSubject, facts: TreeFacts, options: ExportOptions) -> tuple[str, list[str]]:
    """Return the file name and the configuration of the FIL back end.

    Classifiers answer with the probability of each class, also those of two; all others with one value.
    """
    if facts.booster == "gblinear":
        raise unsupported(subject, why="a linear booster, which FIL does not run", allowed=ALLOWED)
    features = facts.features or next((each.shape[-1] for each in subject.version.inputs if each.shape), None)
    if features is None or features < 1:
        fix = "register it with inputs=(TensorSpec(name=…, dtype=…, shape=(-1, FEATURES)),)"
        raise unsupported(subject, why="its number of features is not known", allowed=ALLOWED, fix=fix)
    model_type, file_name = TREE_FILES[subject.version.format, facts.layout]
    classes = max(facts.classes, 2 if facts.objective in BINARY else 1)
    is_classifier = facts.objective in (*BINARY, *MULTICLASS)
    input_ = TensorSpec(name="input__0", dtype="float32", shape=(-1, features))
    output = TensorSpec(name="output__0", dtype="float32", shape=(-1, classes if is_classifier else 1))
    parameters = {
        "model_type": model_type,
        "output_class": "true" if is_classifier else "false",
        "predict_proba": "true" if is_classifier else "false",
    }
    lines = ['backend: "fil"', *_batching(options.max_batch_rows or 1)]
    lines += [*_tensor("input", input_, skipped=1), *_tensor("output", output, skipped=1)]
    for name, value in parameters.items():
        lines.append(f"parameters {{ key: {quoted(name)} value {{ string_value: {quoted(value)} }} }}")
    return file_name, lines


def _instances(options: ExportOptions) -> list[str]:
    kind = "KIND_GPU" if options.gpus else "KIND_CPU"
    return [f"instance_group {{ count: 1 kind: {kind} }}"]
