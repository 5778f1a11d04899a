"""What every engine has in common: its interface, the limits of a run, and checks of what a model answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt

from falaj.errors import InvalidInput, TooLarge
from falaj.records.serving.tensors import DYNAMIC, ServedModel
from falaj.serving.runtime.probe import RunCost

Array = npt.NDArray[Any]

LONGEST_S = 60.0
TRIAL_S = 10.0
QUICK_S = 0.5
"""Time limits of a run: of any model, of a trial, and on the event loop, which it blocks."""

MODEL_MEMORY_BYTES = 2**30
"""Memory of runs, unless `serving.model_memory` says otherwise."""
MAX_OUTPUT_BYTES = 64 * 2**20
"""Bytes of all outputs of a run."""

_OUT_OF_MEMORY = (
    *("bfc_arena", "bad allocation", "bad_alloc", "allocate memory", "Unable to allocate"),
    *("DefaultCPUAllocator", "CUDA out of memory", "Cannot allocate"),
)
"""How the frameworks and NumPy say that memory is missing."""


class ModelEngine(Protocol):
    """A loaded model version; `run` may be called from several threads at once."""

    @property
    def model(self) -> ServedModel: ...
    @property
    def cost(self) -> RunCost: ...
    @property
    def in_process(self) -> bool:
        """Return whether it runs in the server's process, and so in its thread pool."""
        ...

    def run(self, inputs: Sequence[Array], *, limit_s: float = LONGEST_S) -> list[Array]: ...
    def close(self) -> None: ...


def require_small_outputs(outputs: Sequence[Array]) -> None:
    size = sum(getattr(array, "nbytes", 0) for array in outputs)
    if size > MAX_OUTPUT_BYTES:
        raise TooLarge.at("outputs", given=f"{size} bytes", allowed=f"at most {MAX_OUTPUT_BYTES} bytes")


def require_declared_outputs(model: ServedModel, outputs: Sequence[Array]) -> None:
    """Raise InvalidInput unless a model has answered as it declares. One without a shape has declared nothing."""
    if len(outputs) != len(model.outputs):
        raise InvalidInput(
            f"the model {model.name}@{model.version} answered with {len(outputs)} outputs where it declares "
            f"{len(model.outputs)}; its answer is not passed on"
        )
    for tensor, array in zip(model.outputs, outputs, strict=True):
        shape = getattr(array, "shape", None)
        if tensor.shape and (shape is None or not _agrees(tensor.shape, shape)):
            given = "no tensor" if shape is None else f"the shape {list(shape)}"
            raise InvalidInput(
                f"the model {model.name}@{model.version} answered {tensor.name} with {given} where it declares "
                f"{list(tensor.shape)}; its answer is not passed on"
            )


def _agrees(declared: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(declared) == len(shape) and all(
        size in (DYNAMIC, found) for size, found in zip(declared, shape, strict=True)
    )


def explained(error: Exception) -> Exception:
    """Return TooLarge if memory was missing, else the error itself."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
        return TooLarge("these values need more memory than a run may use (serving.model_memory)")
    return error
