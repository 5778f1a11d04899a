"""The worker process of one model: it opens the model, limits its own memory, and runs what it is sent.

    python -I -m falaj.serving.runtime.worker_process MEMORY_BYTES

Its standard output is the control socket, over which it gets a socket for each run that it does at a time. It runs in a
sandbox where there is one, has no key, no token and no file of the platform, and ends when the server closes its end.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
from pathlib import Path

from falaj.errors import Unavailable
from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import ServedFile
from falaj.serving.runtime.engine import ModelEngine
from falaj.serving.runtime.engines.opened import ModelContents, probed
from falaj.serving.runtime.worker_protocol import (
    Loaded,
    LoadRequest,
    Outputs,
    RunRequest,
    receive,
    receive_arrays,
    reply,
    reply_error,
    wire,
)

DRIVER, DRIVER_BYTES = Path("/dev/nvidiactl"), 64 << 30
"""A worker that sees a GPU maps much that it does not use; what it has mapped when it is loaded is its own."""
MAX_CONNECTIONS = 128
PYTHON = "python"
"""The platform of models that are user code."""
LOAD_FACTOR = 4
"""Memory for opening a model, in sizes of its file: the bytes, the parsed graph and prepacked weights."""


def main(memory_bytes: int, control: socket.socket, runs: list[socket.socket]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    request = receive(control, LoadRequest)
    file = ServedFile.model_validate_json(request.file)
    contents = ModelContents(request.content, request.others)
    del request
    try:
        engine = _open(file, contents, memory_bytes)
    except MemoryError:
        name = f"{file.model}@{file.version}"
        reply_error(
            control, Unavailable(f"{name} needs more memory to be opened than serving.model_memory allows")
        )
        return
    except Exception as error:
        reply_error(control, error)
        return
    del contents
    for connection in runs:
        threading.Thread(target=_serve, args=(connection, engine), daemon=True).start()
    _limit_growth(memory_bytes)
    cost = engine.cost
    model = engine.model.model_dump_json().encode()
    reply(control, Loaded(model, cost.seconds, cost.rows, cost.more_seconds))
    control.recv(1)  # returns when the server is gone, or wants this to end


def _open(file: ServedFile, contents: ModelContents, memory_bytes: int) -> ModelEngine:
    """Import the framework of the file, and nothing else; then open the file with limited memory."""
    size = len(contents.model) + sum(map(len, contents.others.values()))
    loading_bytes = memory_bytes + LOAD_FACTOR * size + (DRIVER_BYTES if DRIVER.exists() else 0)
    if file.format is FileFormat.ONNX and file.settings.engine != "openvino":
        from falaj.serving.runtime.engines.onnx import open_session

        _limit_growth(loading_bytes)
        return open_session(file, contents.model, memory_bytes=memory_bytes, is_bounded=False)
    from falaj.serving.runtime.engines.choice import find_opener

    opener = find_opener(file)
    _limit_growth(loading_bytes, is_final=file.format is FileFormat.PYTHON)
    return probed(file, opener(file, contents))


def _serve(connection: socket.socket, engine: ModelEngine) -> None:
    while True:
        try:
            request = receive(connection, RunRequest)
            inputs = receive_arrays(connection, request.inputs)
        except (EOFError, OSError):
            return
        except Exception:  # nobody would answer on this connection again
            os._exit(1)
        try:
            described, raw = wire(engine.run(inputs, limit_s=request.limit_s))
            reply(connection, Outputs(described), raw)
        except Exception as error:
            reply_error(connection, error)
            if isinstance(error.__context__, MemoryError) and engine.model.platform == PYTHON:
                os._exit(1)  # what user code has kept does not come back; the server starts another


def _limit_growth(size: int, *, is_final: bool = False) -> None:
    """Limit the private memory of this process to `size` bytes more than it has now; `is_final`: it cannot get more."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _private_bytes() + size
    limit = limit if hard < 0 else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit if is_final else hard))


def _private_bytes() -> int:
    """Return what counts for RLIMIT_DATA; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


if __name__ == "__main__":
    control = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)  # nothing but messages goes to the server
    os.chdir("/")  # the folder that it was started in is not for models
    control.sendall(b"\0")  # ready
    received = socket.recv_fds(control, 1, MAX_CONNECTIONS)
    main(int(sys.argv[1]), control, [socket.socket(fileno=descriptor) for descriptor in received[1]])
    os._exit(0)  # runs that have not ended do not matter any more
