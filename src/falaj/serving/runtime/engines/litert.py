"""LiteRT: models of phones and boards (.tflite), in an interpreter per thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert.interpreter import Interpreter

from falaj.errors import InvalidInput
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.tensors import DYNAMIC, Datatype, Tensor
from falaj.serving.runtime.engines.fixed_batch import any_rows
from falaj.serving.runtime.engines.opened import ModelContents, OpenedModel, not_opened, typed
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]

PLATFORM = "litert"
DATATYPES = {
    dtype: datatype for datatype, dtype in NUMPY.items() if datatype not in (Datatype.BF16, Datatype.BYTES)
}


def open_model(file: ServedFile, contents: ModelContents) -> OpenedModel:
    """Open a model. Dimensions that its file calls dynamic are; a fixed number of rows is padded."""
    threads = min(file.settings.threads or 1, os.cpu_count() or 1)
    try:
        interpreters = _Interpreters(contents.model, threads)
        first = interpreters.of_thread()
        inputs = tuple(_tensor(file, each) for each in first.get_input_details())
        outputs = tuple(_tensor(file, each) for each in first.get_output_details())
    except (ValueError, RuntimeError, TypeError) as error:
        raise not_opened(file, "a LiteRT model", error) from None

    def run(given: Sequence[Array]) -> list[Array]:
        interpreter = interpreters.of_thread()
        details = interpreter.get_input_details()
        changed = [
            (each["index"], array.shape)
            for each, array in zip(details, given, strict=True)
            if tuple(each["shape"]) != array.shape
        ]
        for index, shape in changed:
            interpreter.resize_tensor_input(index, shape)
        if changed:
            interpreter.allocate_tensors()
        for each, array in zip(details, given, strict=True):
            interpreter.set_tensor(each["index"], np.ascontiguousarray(array))
        interpreter.invoke()
        found = [interpreter.get_tensor(each["index"]) for each in interpreter.get_output_details()]
        return typed(found, outputs)

    return any_rows(OpenedModel(PLATFORM, inputs, outputs, run))


class _Interpreters:
    """One interpreter for each thread: it keeps the tensors of its run."""

    def __init__(self, content: bytes, threads: int) -> None:
        self._content = content
        self._threads = threads
        self._kept = threading.local()

    def of_thread(self) -> Any:
        found = getattr(self._kept, "interpreter", None)
        if found is None:
            found = Interpreter(model_content=self._content, num_threads=self._threads)
            found.allocate_tensors()
            self._kept.interpreter = found
        return found


def _tensor(file: ServedFile, details: Mapping[str, Any]) -> Tensor:
    datatype = DATATYPES.get(np.dtype(details["dtype"]))
    if datatype is None:
        raise InvalidInput(
            f"{file.model}@{file.version} has the tensor {details['name']} of the type "
            f"{np.dtype(details['dtype'])}; allowed numbers"
        )
    signature = details.get("shape_signature")
    shape = details["shape"] if signature is None or not len(signature) else signature
    return Tensor(
        name=details["name"],
        datatype=datatype,
        shape=tuple(DYNAMIC if size < 0 else int(size) for size in shape),
    )
