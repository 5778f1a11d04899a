"""ONNX Runtime engines: one single-threaded session per model version, probed when it is loaded."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import onnxruntime as ort

from falaj.errors import Damaged, InvalidInput, NotFound, Unavailable
from falaj.records.serving import DYNAMIC, Datatype, ServedFile, ServedModel, Tensor
from falaj.serving.runtime.probe import RunCost, measure

Array = npt.NDArray[Any]

PLATFORM = "onnx_onnxv1"
"""The name of this format in the Open Inference Protocol."""

NOWHERE = "/dev/null"
"""Folder of external weight files. By default ONNX Runtime reads them from the server's working folder, so that an
untrusted model could expose files there."""

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

LONGEST_S = 60.0
TRIAL_S = 10.0
QUICK_S = 2.0
"""Time limits of a run: of any model, of a trial, and of a fast model, which blocks the event loop."""

WATCH_INTERVAL_S = 0.25

_log = logging.getLogger(__name__)


class Watchdog:
    """Watches the runs of all models of a process from one thread, which starts with the first run."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[float, ort.RunOptions]] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, session: ort.InferenceSession, feed: Mapping[str, Array], *, limit_s: float) -> list[Array]:
        """Return the outputs for `feed`. Raise Unavailable after `limit_s`."""
        if self._thread is None:
            self._start()
        options = ort.RunOptions()
        self._running[id(options)] = until, _ = time.monotonic() + limit_s, options
        try:
            outputs: list[Array] = session.run(None, feed, options)
            return outputs
        except Exception:
            if time.monotonic() < until:
                raise
            raise Unavailable(f"the model exceeded its time limit of {limit_s:g} s") from None
        finally:
            del self._running[id(options)]

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_INTERVAL_S)
            now = time.monotonic()
            for until, options in list(self._running.values()):
                if now > until:
                    options.terminate = True


WATCHDOG = Watchdog()


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
        """Return the outputs for `inputs`, both in the model's order."""
        feed: Mapping[str, Array] = dict(zip(self.names, inputs, strict=True))
        return WATCHDOG.run(self.session, feed, limit_s=QUICK_S if self.cost.inline else LONGEST_S)


def load(file: ServedFile) -> OnnxEngine:
    """Read, verify, open and probe a model file. Slow: call it in a thread."""
    return open_model(file, _verified_bytes(file))


def open_model(file: ServedFile, content: bytes) -> OnnxEngine:
    """Open and probe a model from its verified bytes, which are never written to disk in clear."""
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
    """Read and verify the bytes of a file once, so that the hashed bytes are those that run."""
    if file.path is None:
        raise NotFound(f"{file.model}@{file.version} has no file")
    try:
        content = file.path.read_bytes()
    except OSError as error:
        raise NotFound(f"the file of {file.model}@{file.version} cannot be read: {error.strerror}") from None
    if file.sha256 is not None and hashlib.sha256(content).hexdigest() != file.sha256:
        raise Damaged(f"the file of {file.model}@{file.version} differs from the registered one: wrong hash")
    return content


def _open(file: ServedFile, content: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # requests run in parallel; a model on all cores would make them queue
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
