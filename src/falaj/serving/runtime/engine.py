"""ONNX Runtime: one session per model version, on one thread, measured when it is loaded."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import onnxruntime as ort

from falaj.errors import Damaged, InvalidInput, NotFound
from falaj.records.serving import DYNAMIC, Datatype, ServedFile, ServedModel, Tensor
from falaj.serving.runtime.probe import RunCost, measure

Array = npt.NDArray[Any]

PLATFORM = "onnx_onnxv1"
"""What the Open Inference Protocol calls a model in this format."""

NOWHERE = "/dev/null"
"""Where a model finds the files that it names as its weights. Unless told so, ONNX Runtime would read them from the
server's working folder: a stranger's model could answer with what lies there."""

DATATYPES = {
    "tensor(bool)": Datatype.BOOL,
    "tensor(uint8)": Datatype.UINT8,
    "tensor(uint16)": Datatype.UINT16,
    "tensor(uint32)": Datatype.UINT32,
    "tensor(uint64)": Datatype.UINT64,
    "tensor(int8)": Datatype.INT8,
    "tensor(int16)": Datatype.INT16,
    "tensor(int32)": Datatype.INT32,
    "tensor(int64)": Datatype.INT64,
    "tensor(float16)": Datatype.FP16,
    "tensor(float)": Datatype.FP32,
    "tensor(double)": Datatype.FP64,
    "tensor(string)": Datatype.BYTES,
}

WATCHDOG = Watchdog()
LONGEST_S = 60.0
TRIAL_S = 10.0
QUICK_S = 2.0
"""How long a run may take at most: any, one on made-up values, and one of a model that was quick then, for it holds up
all others."""

_log = logging.getLogger(__name__)


class ModelEngine(Protocol):
    """A loaded model version; `run` may be called from several threads at once."""

    @property
    def model(self) -> ServedModel: ...
    @property
    def cost(self) -> RunCost: ...
    def run(self, inputs: Sequence[Array]) -> list[Array]: ...


@dataclass(frozen=True, slots=True)
class OnnxEngine:
    """An ONNX model in a session of its own."""

    model: ServedModel
    cost: RunCost
    session: ort.InferenceSession
    names: tuple[str, ...]

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """The outputs for `inputs`, both in the model's order."""
        feed: Mapping[str, Array] = dict(zip(self.names, inputs, strict=True))
        return WATCHDOG.run(self.session, feed, limit_s=QUICK_S if self.cost.inline else LONGEST_S)


def load(file: ServedFile) -> OnnxEngine:
    """Read, verify, open and measure a model in a file; takes as long as that takes, so call it in a thread."""
    return open_model(file, _verified_bytes(file))


def open_model(file: ServedFile, content: bytes) -> OnnxEngine:
    """Open and measure a model whose verified bytes are `content`; they never lie on a disk in clear."""
    session = _open(file, content)
    model = ServedModel(
        name=file.model,
        version=file.version,
        platform=PLATFORM,
        inputs=tuple(_tensor(file, node) for node in session.get_inputs()),
        outputs=tuple(_tensor(file, node) for node in session.get_outputs()),
    )
    names = tuple(tensor.name for tensor in model.inputs)

    def trial(inputs: Sequence[Array]) -> list[Array]:
        return WATCHDOG.run(session, dict(zip(names, inputs, strict=True)), limit_s=TRIAL_S)

    cost = measure(model, trial)
    _log.info("loaded %s@%s: %s", file.model, file.version, cost)
    return OnnxEngine(model, cost, session, names)


def _verified_bytes(file: ServedFile) -> bytes:
    """The file's bytes, read once: what was hashed is what is run."""
    if file.path is None:
        raise NotFound(f"{file.model}@{file.version} has no file")
    try:
        content = file.path.read_bytes()
    except OSError as error:
        raise NotFound(f"the file of {file.model}@{file.version} cannot be read: {error.strerror}") from None
    if file.sha256 is not None and hashlib.sha256(content).hexdigest() != file.sha256:
        raise Damaged(f"the file of {file.model}@{file.version} is not what was registered: its hash differs")
    return content


def _open(file: ServedFile, content: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # requests run side by side; a model on all cores would make them queue
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", NOWHERE)
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises a dozen types that share no parent but this
        raise InvalidInput(
            f"{file.model}@{file.version} is not an ONNX model that can be opened: {error}"
        ) from error


def _tensor(file: ServedFile, node: ort.NodeArg) -> Tensor:
    datatype = DATATYPES.get(node.type)
    if datatype is None:
        raise InvalidInput.at(
            f"{file.model}@{file.version} {node.name}",
            given=node.type,
            allowed=", ".join(DATATYPES),
            fix="export the model with plain tensors (for scikit-learn: zipmap off)",
        )
    shape = tuple(size if isinstance(size, int) and size >= 0 else DYNAMIC for size in node.shape or ())
    return Tensor(name=node.name, datatype=datatype, shape=shape)
