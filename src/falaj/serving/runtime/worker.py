"""A model in a worker process of its own: with a limit of memory, killed if it hangs, and started again."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy.typing as npt

from falaj.errors import FalajError, Fault, InvalidInput, IsolationRefused, TooLarge, Unavailable, rebuild
from falaj.ports.sandbox import Sandbox, UserCode
from falaj.records.no_telemetry import NO_TELEMETRY
from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.tensors import ServedModel
from falaj.serving.runtime.engine import (
    LONGEST_S,
    MAX_OUTPUT_BYTES,
    require_declared_outputs,
)
from falaj.serving.runtime.engines.opened import ModelContents
from falaj.serving.runtime.probe import RunCost
from falaj.serving.runtime.worker_protocol import (
    LONGEST_MESSAGE,
    MOST_FAULTS,
    Failed,
    Loaded,
    LoadRequest,
    Outputs,
    RunRequest,
    receive_arrays,
    receive_reply,
    send,
    wire,
)
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]

START_S = 120.0
"""How long a worker may take to open and probe its model."""
GRACE_S = 5.0
"""A run stops itself at its limit; a worker that has not answered this much later is killed."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
PROVEN_S = 60.0
"""A worker that has lived so long is started again at once; requests that kill it do not start one after another."""
MAX_CONNECTIONS = 128
"""Of one worker: below the kernel's limit of descriptors in a message."""
COMMAND = ("-I", "-m", "falaj.serving.runtime.worker_process")
PACKAGE = Path(__file__).parents[2]
SCRATCH_BYTES = 1 << 20
COMPILER_BYTES = 1 << 30
"""What a private /tmp may hold: by default next to nothing, for a compiler what it makes."""
ON_GPUS = frozenset({FileFormat.ONNX, FileFormat.TORCH_EXPORT})
"""The formats whose engines use a GPU if they find one."""
ENVIRONMENT = {"PATH": os.defpath, "MALLOC_ARENA_MAX": "2", **NO_TELEMETRY}
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES")
NOT_APART = (
    "a model that is Python code runs only where a sandbox keeps it apart from the platform, and none works here; "
    "'falaj doctor' says what each of them lacks"
)

WORKER_ERRORS = frozenset(kind.code for kind in (InvalidInput, TooLarge, Unavailable))
"""The errors that a worker may raise here."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerNeeds:
    """What the worker of a model gets beyond a process, and what the sandbox has to keep from it.

    `is_separate`: it is started only where a sandbox keeps it apart from the platform.
    """

    is_separate: bool = False
    has_children: bool = False
    has_devices: bool = False
    scratch_bytes: int = SCRATCH_BYTES


def needs_of(file: ServedFile) -> WorkerNeeds:
    """Return what a file needs: torch starts a compiler, and what can run on a GPU sees the machine's.

    User code gets a GPU only where the endpoint says so.
    """
    compiles = bool(file.settings.compiled) and file.format is FileFormat.TORCH_EXPORT
    device = file.settings.device or "auto"
    return WorkerNeeds(
        is_separate=file.format is FileFormat.PYTHON,
        has_children=compiles,
        has_devices=device == "gpu" or (device == "auto" and file.format in ON_GPUS),
        scratch_bytes=COMPILER_BYTES if compiles else SCRATCH_BYTES,
    )


class StartedWorker(NamedTuple):
    """A process that is ready for a model, the connection to it, and its folder, which ends with it."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    folder: Path


class WorkerStarter:
    """Starts worker processes in the strongest sandbox in which one gets ready: `sandboxes`, in their order.

    `hidden` are paths that must stay closed to a worker even where a sandbox shows the machine; `devices` are those of
    the GPUs.
    """

    def __init__(
        self,
        sandboxes: Callable[[], Sequence[Sandbox]] | None = None,
        *,
        hidden: Sequence[Path] = (),
        devices: Sequence[Path] = (),
    ) -> None:
        self._sandboxes = sandboxes or (lambda: [PlainProcess()])
        self._hidden = tuple(hidden)
        self._devices = tuple(devices)
        self._found: list[Sandbox] = []
        # A sandboxed process ends with the thread that started it, so one thread starts them all.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="workers")

    def start(self, memory_bytes: int, needs: WorkerNeeds) -> StartedWorker:
        """Return a process that is ready for a model, and the connection to it."""
        return self._thread.submit(self._start, memory_bytes, needs).result()

    def _start(self, memory_bytes: int, needs: WorkerNeeds) -> StartedWorker:
        self._found = self._found or list(self._sandboxes())
        faults = []
        for sandbox in list(self._found):
            if needs.is_separate and sandbox.name == PlainProcess.name:
                continue
            try:
                return self._start_in(sandbox, memory_bytes, needs)
            except (IsolationRefused, OSError, EOFError) as error:
                faults.append(Fault(where=sandbox.name, given=str(error) or type(error).__name__))
                if len(self._found) > 1:
                    _log.warning("no worker process starts in the sandbox %s: %s", sandbox.name, error)
                    self._found.remove(sandbox)
        if needs.is_separate:
            raise IsolationRefused(NOT_APART, faults=faults)
        raise Unavailable("no worker process can be started", faults=faults)

    def _start_in(self, sandbox: Sandbox, memory_bytes: int, needs: WorkerNeeds) -> StartedWorker:
        ours, theirs = socket.socketpair()
        folder = Path(tempfile.mkdtemp(prefix="falaj-model-"))
        code = UserCode(
            [sys.executable, *COMMAND, str(memory_bytes)],
            folder,
            environment={**ENVIRONMENT, **_visible_gpus(needs)},
            readable=[PACKAGE],
            hidden=self._hidden,
            devices=self._devices if needs.has_devices else (),
            children=needs.has_children,
            scratch_bytes=needs.scratch_bytes,
            shared_memory_bytes=SCRATCH_BYTES,
        )
        process = None
        try:
            with theirs:
                process = sandbox.start(code, stdout=theirs.fileno(), stderr=subprocess.DEVNULL)
            ours.settimeout(START_S)
            if not ours.recv(1):
                raise EOFError("it ended before it was ready")
        except BaseException:
            ours.close()
            if process is not None:
                _kill(process)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return StartedWorker(process, ours, folder)


def _visible_gpus(needs: WorkerNeeds) -> dict[str, str]:
    """Return what says which GPUs a worker sees, those of the server, and where the driver's libraries are."""
    given = {name: os.environ[name] for name in GPU_VARIABLES if name in os.environ}
    return given if needs.has_devices else {}


class PlainProcess:
    """A process of the same user, without an environment: where no sandbox is asked for."""

    name = "same-uid"
    gaps = ()

    def start(self, code: UserCode, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            code.command,
            env=dict(code.environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


class WorkerEngine:
    """A model version in a worker process. It ends with this object, or with this process."""

    in_process = False

    def __init__(
        self,
        file: ServedFile,
        contents: ModelContents,
        *,
        memory_bytes: int,
        threads: int | None = None,
        starter: WorkerStarter | None = None,
    ) -> None:
        """Start the worker and wait until the model is loaded. Raise if it cannot be opened."""
        self._starter = starter or WorkerStarter()
        self._file = file
        self._contents = contents
        self._memory_bytes = memory_bytes
        self.threads = threads or file.settings.instances or os.cpu_count() or 1
        self._lock = threading.Lock()
        self._restart_at = 0.0
        self._backoff_s = 0.0
        self._worker: _Worker | None = self._start()
        self.model, self.cost = self._worker.model, self._worker.cost

    def run(self, inputs: Sequence[Array], *, limit_s: float = LONGEST_S) -> list[Array]:
        """Return the outputs for `inputs`. Raise Unavailable if the worker has died or exceeds `limit_s`."""
        worker = self._running()
        try:
            outputs = worker.run(inputs, limit_s=limit_s)
            require_declared_outputs(self.model, outputs)
            _require_datatypes(self.model, outputs)
        except WorkerLostError as error:
            self._lost(worker, str(error))
            raise Unavailable(f"the process of {self._name} {error}; it is started again") from None
        self._backoff_s = min(self._backoff_s, MIN_BACKOFF_S)
        return outputs

    def close(self) -> None:
        with self._lock:
            worker, self._worker, self._restart_at = self._worker, None, float("inf")
        if worker is not None:
            worker.end()

    @property
    def _name(self) -> str:
        return f"{self._file.model}@{self._file.version}"

    def _running(self) -> _Worker:
        """Return the worker, started again if it was lost."""
        with self._lock:
            if self._worker is not None and self._worker.process.poll() is not None:
                self._forget("has ended")
            if self._worker is None:
                left_s = self._restart_at - time.monotonic()
                if left_s > 0:
                    raise Unavailable(
                        f"the process of {self._name} ended and waits to be started again",
                        details={"retry_after_s": ceil(min(left_s, MAX_BACKOFF_S))},
                    )
                self._worker = self._start()
            return self._worker

    def _start(self) -> _Worker:
        return _Worker(self._starter, self._file, self._contents, self._memory_bytes, self.threads)

    def _lost(self, worker: _Worker, reason: str) -> None:
        with self._lock:
            if self._worker is worker:
                self._forget(reason)

    def _forget(self, reason: str) -> None:
        """End a worker that is lost; the lock is held."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        now = time.monotonic()
        if now - worker.started_at > PROVEN_S:
            self._backoff_s = 0.0
        self._restart_at = now + self._backoff_s
        self._backoff_s = min(max(MIN_BACKOFF_S, 2 * self._backoff_s), MAX_BACKOFF_S)
        worker.end()
        _log.error("the process of %s %s", self._name, reason)


class WorkerLostError(Exception):
    """A worker has ended, or does not answer."""


class _Worker:
    """One process, and a connection for each run that it does at a time."""

    def __init__(
        self,
        starter: WorkerStarter,
        file: ServedFile,
        contents: ModelContents,
        memory_bytes: int,
        threads: int,
    ) -> None:
        self.process, control, folder = starter.start(memory_bytes, needs_of(file))
        self.started_at = time.monotonic()
        pairs = [socket.socketpair() for _ in range(min(threads, MAX_CONNECTIONS))]
        ours, theirs = [control, *(pair[0] for pair in pairs)], [pair[1] for pair in pairs]
        try:
            socket.send_fds(control, [b"\0"], [connection.fileno() for connection in theirs])
        except OSError:
            _log.warning("the process of %s@%s ended at once", file.model, file.version)  # `_load` says so
        finally:
            for connection in theirs:
                connection.close()
        self._free: queue.LifoQueue[socket.socket] = queue.LifoQueue()  # the one used last is the warmest
        self.end = weakref.finalize(self, _end, self.process, ours, self._free, folder)
        for connection in ours[1:]:
            self._free.put(connection)
        loaded = self._load(ours[0], file, contents)
        self.model = ServedModel.model_validate_json(loaded.model)
        self.cost = RunCost(loaded.seconds, rows=loaded.rows, inline_rows=0, more_seconds=loaded.more_seconds)

    def _load(self, control: socket.socket, file: ServedFile, contents: ModelContents) -> Loaded:
        control.settimeout(START_S)
        try:
            request = LoadRequest(file.model_dump_json().encode(), contents.model, dict(contents.others))
            send(control, request)
            loaded = receive_reply(control, Loaded)
        except (OSError, EOFError, ValueError) as error:
            self.end()
            raise Unavailable(
                f"{file.model}@{file.version} cannot be opened within its limits of memory and time "
                f"(serving.model_memory): {type(error).__name__}"
            ) from None
        if isinstance(loaded, Failed):
            self.end()
            found = _rebuilt(loaded)
            if isinstance(found, FalajError):
                raise found
            raise InvalidInput(f"{file.model}@{file.version} cannot be opened: {found}")
        return loaded

    def run(self, inputs: Sequence[Array], *, limit_s: float) -> list[Array]:
        connection = self._free.get()
        try:
            connection.settimeout(limit_s + GRACE_S)
            described, raw = wire(inputs)
            send(connection, RunRequest(described, limit_s), raw)
            found = receive_reply(connection, Outputs)
            outputs = []
            if isinstance(found, Outputs):
                outputs = receive_arrays(connection, found.arrays, limit_bytes=MAX_OUTPUT_BYTES)
        except TimeoutError:
            connection.close()
            raise WorkerLostError(f"did not stop at the time limit of {limit_s:g} s") from None
        except (OSError, EOFError, ValueError, TypeError, msgspec.DecodeError):
            connection.close()
            raise WorkerLostError("ended during a run, perhaps for lack of memory") from None
        finally:
            self._free.put(connection)
        if isinstance(found, Failed):
            raise _rebuilt(found)
        return outputs


def _require_datatypes(model: ServedModel, outputs: Sequence[Array]) -> None:
    """Raise InvalidInput if a worker, which is not trusted, answers with other types than the model declares."""
    for tensor, array in zip(model.outputs, outputs, strict=True):
        if array.dtype != NUMPY[tensor.datatype]:
            raise InvalidInput(
                f"the model {model.name}@{model.version} answered {tensor.name} with the type {array.dtype} where it "
                f"declares {tensor.datatype}; its answer is not passed on"
            )


def _end(
    process: subprocess.Popen[bytes],
    connections: Sequence[socket.socket],
    free: queue.LifoQueue[socket.socket],
    folder: Path,
) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for connection in connections:  # a thread that reads from one gets the end of it, and closes it
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    unused = [connections[0], *(free.get_nowait() for _ in range(free.qsize()))]
    for connection in unused:
        connection.close()
        free.put(connection)  # whoever waits for one must not wait for ever
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rebuilt(failed: Failed) -> Exception:
    """Return an error of the worker, which is not trusted: one of a few of ours, or what the model raised."""
    if failed.code in WORKER_ERRORS:
        faults = [fault for fault in failed.faults[:MOST_FAULTS] if fault.keys() <= Fault.model_fields.keys()]
        return rebuild(failed.code, failed.message[:LONGEST_MESSAGE], [dict(fault) for fault in faults], {})
    return RuntimeError(failed.message[:LONGEST_MESSAGE])
