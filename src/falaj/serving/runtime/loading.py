"""Load model versions: ONNX whose work is bounded in this process, all others in a worker process of their own."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

from falaj.errors import Damaged, InvalidInput, NotFound
from falaj.records.config import ModelIsolation
from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import ServedFile
from falaj.serving.runtime.engine import MODEL_MEMORY_BYTES, ModelEngine
from falaj.serving.runtime.engines.opened import ModelContents, probed
from falaj.serving.runtime.worker import WorkerEngine, WorkerStarter

_log = logging.getLogger(__name__)


def load(file: ServedFile) -> ModelEngine:
    """Read, verify, open and probe a model file. Slow: call it in a thread."""
    return open_model(file, verified_bytes(file))


def load_here(file: ServedFile, others: Mapping[str, bytes] | None = None) -> ModelEngine:
    """Read, verify, open and probe a model file in this process, which holds nothing that its bytes could harm.

    `others` are the files that accompany it, by path.
    """
    content = verified_bytes(file)
    if file.format is FileFormat.ONNX:
        from falaj.serving.runtime.engines.onnx import open_session
        from falaj.serving.runtime.engines.operators import reason_unbounded

        is_bounded = reason_unbounded(content) is None
        return open_session(file, content, memory_bytes=MODEL_MEMORY_BYTES, is_bounded=is_bounded)
    from falaj.serving.runtime.engines.choice import find_opener

    return probed(file, find_opener(file)(file, ModelContents(content, others or {})))


def open_model(
    file: ServedFile,
    contents: ModelContents | bytes,
    *,
    isolation: ModelIsolation = "auto",
    memory_bytes: int = MODEL_MEMORY_BYTES,
    starter: WorkerStarter | None = None,
) -> ModelEngine:
    """Open and probe a model from its verified bytes, which are never written to disk in clear."""
    if file.format is FileFormat.ENSEMBLE:
        raise InvalidInput(
            f"{file.model}@{file.version} is an ensemble, whose steps the platform's model server opens"
        )
    if isinstance(contents, bytes):
        contents = ModelContents(contents)
    reason = f"its format is {file.format}" if file.format is not FileFormat.ONNX else None
    if file.settings.engine == "openvino":
        reason = "its engine is OpenVINO"
    if reason is None:
        # The server needs ONNX Runtime for ONNX alone.
        from falaj.serving.runtime.engines.onnx import open_session, reason_apart

        reason = reason_apart(file, contents.model, isolation)
        if reason is None:
            return open_session(file, contents.model, memory_bytes=memory_bytes, is_bounded=True)
    _log.info("%s@%s runs in a process of its own: %s", file.model, file.version, reason)
    return WorkerEngine(file, contents, memory_bytes=memory_bytes, starter=starter)


def verified_bytes(file: ServedFile) -> bytes:
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
