"""Load model versions: those whose work is bounded in this process, all others in a worker process of their own."""

from __future__ import annotations

import hashlib
import logging

from falaj.errors import Damaged, NotFound
from falaj.records.config import ModelIsolation
from falaj.records.serving.endpoints import ServedFile
from falaj.serving.runtime.engine import MODEL_MEMORY_BYTES, ModelEngine, open_session
from falaj.serving.runtime.operators import reason_unbounded
from falaj.serving.runtime.worker import WorkerEngine, WorkerStarter

_log = logging.getLogger(__name__)


def load(file: ServedFile) -> ModelEngine:
    """Read, verify, open and probe a model file. Slow: call it in a thread."""
    return open_model(file, _verified_bytes(file))


def open_model(
    file: ServedFile,
    content: bytes,
    *,
    isolation: ModelIsolation = "auto",
    memory_bytes: int = MODEL_MEMORY_BYTES,
    starter: WorkerStarter | None = None,
) -> ModelEngine:
    """Open and probe a model from its verified bytes, which are never written to disk in clear."""
    reason = reason_unbounded(content)
    if reason is None and isolation == "auto":
        return open_session(file, content, memory_bytes=memory_bytes, is_bounded=True)
    why = reason or "serving.isolation is always"
    _log.info("%s@%s runs in a process of its own: %s", file.model, file.version, why)
    return WorkerEngine(file, content, memory_bytes=memory_bytes, starter=starter)


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
