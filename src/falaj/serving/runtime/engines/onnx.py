"""ONNX Runtime: one session per model version, on the CPU in this process, or on a GPU in a worker process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import onnxruntime as ort

from falaj.errors import InvalidInput, Unavailable
from falaj.records.config import ModelIsolation
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.tensors import DYNAMIC, Datatype, ServedModel, Tensor
from falaj.serving.runtime.engine import (
    LONGEST_S,
    QUICK_S,
    TRIAL_S,
    explained,
    require_declared_outputs,
    require_small_outputs,
)
from falaj.serving.runtime.engines.converted_session import BFLOAT16, STRING, RunSession, converting
from falaj.serving.runtime.engines.operators import reason_unbounded
from falaj.serving.runtime.engines.providers import CPU, CUDA, BoundSession, providers_here
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
    "tensor(bfloat16)": Datatype.BF16,
    "tensor(float)": Datatype.FP32,
    "tensor(double)": Datatype.FP64,
    "tensor(string)": Datatype.BYTES,
}

WATCH_INTERVAL_S = 0.1

_log = logging.getLogger(__name__)


class Watchdog:
    """Watches the runs of all models of a process from one thread, which starts with the first run."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[float, ort.RunOptions]] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, session: RunSession, feed: Mapping[str, Array], *, limit_s: float) -> list[Array]:
        """Return the outputs for `feed`. Raise Unavailable after `limit_s`."""
        if self._thread is None:
            self._start()
        options = ort.RunOptions()
        if limit_s > QUICK_S:  # what a large run has grown the arena by is given back
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
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


@dataclass(frozen=True, slots=True)
class OnnxEngine:
    """An ONNX model in a session of this process."""

    model: ServedModel
    cost: RunCost
    session: RunSession
    names: tuple[str, ...]

    @property
    def in_process(self) -> bool:
        return True

    def close(self) -> None:
        return None

    def run(self, inputs: Sequence[Array], *, limit_s: float = LONGEST_S) -> list[Array]:
        """Return the outputs for `inputs`, both in the model's order."""
        feed: Mapping[str, Array] = dict(zip(self.names, inputs, strict=True))
        try:
            outputs = WATCHDOG.run(self.session, feed, limit_s=limit_s)
        except Exception as error:
            raise explained(error) from None
        require_small_outputs(outputs)
        require_declared_outputs(self.model, outputs)
        return outputs


def open_session(file: ServedFile, content: bytes, *, memory_bytes: int, is_bounded: bool) -> OnnxEngine:
    """Open and probe a model in this process. `is_bounded`: its work follows from the shapes of its inputs."""
    opened = _open(file, content, memory_bytes)
    most_rows = file.settings.max_batch_rows
    model = ServedModel(
        name=file.model,
        version=file.version,
        platform=PLATFORM,
        inputs=tuple(_tensor(file, node) for node in opened.get_inputs()),
        outputs=tuple(_tensor(file, node) for node in opened.get_outputs()),
    )
    session = _bound(opened) or converting(opened)
    names = tuple(tensor.name for tensor in model.inputs)

    def trial(inputs: Sequence[Array]) -> list[Array]:
        return WATCHDOG.run(session, dict(zip(names, inputs, strict=True)), limit_s=TRIAL_S)

    cost = measure(model, trial, is_bounded=is_bounded, max_batch_rows=most_rows)
    _log.info("loaded %s@%s: %s", file.model, file.version, cost)
    return OnnxEngine(model, cost, session, names)


def reason_apart(file: ServedFile, content: bytes, isolation: ModelIsolation) -> str | None:
    """Return why a model does not run in the process that holds the gate; None if it does."""
    if providers_here(file.settings.device) != [CPU]:
        return "it runs on a GPU"
    return reason_unbounded(content) or (None if isolation == "auto" else "serving.isolation is always")


def _open(file: ServedFile, content: bytes, memory_bytes: int) -> ort.InferenceSession:
    providers = providers_here(file.settings.device)
    _SHARED_ARENA.create(memory_bytes)
    options = ort.SessionOptions()
    # requests run in parallel: a model on all cores would make them queue
    options.intra_op_num_threads = min(file.settings.threads or 1, os.cpu_count() or 1)
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", NOWHERE)
    options.add_session_config_entry("session.load_model_format", "ONNX")  # a file can be of two formats
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    options.log_severity_level = 4  # failures are raised; their text would fill the log
    try:
        return ort.InferenceSession(content, options, providers=providers)
    except Exception as error:  # onnxruntime raises a dozen types that share no parent but this
        raise InvalidInput(
            f"{file.model}@{file.version} is not an ONNX model that can be opened: {error}"
        ) from error


def _bound(session: ort.InferenceSession) -> RunSession | None:
    """Return the session with tensors on the GPU, if it has one and its tensors are numbers that NumPy has."""
    types = {node.type for node in (*session.get_inputs(), *session.get_outputs())}
    is_bound = CUDA in session.get_providers() and not types & {BFLOAT16, STRING}
    return BoundSession(session) if is_bound else None


class _SharedArena:
    """The memory of all runs of a process: one arena with a limit, which large runs shrink again. Weights are apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_created = False

    def create(self, memory_bytes: int) -> None:
        with self._lock:
            if not self._is_created:
                arena = ort.OrtArenaCfg(
                    {
                        "max_mem": memory_bytes,
                        "arena_extend_strategy": 1,  # by what is needed, not by powers of two
                        "initial_chunk_size_bytes": 2**20,
                        "max_dead_bytes_per_chunk": 2**20,
                    }
                )
                where = ort.OrtMemoryInfo(
                    "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
                )
                ort.create_and_register_allocator(where, arena)
                self._is_created = True


_SHARED_ARENA = _SharedArena()


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
