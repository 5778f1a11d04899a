"""What each engine makes of a model file, and the engine of the worker process around it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from falaj.errors import FalajError, Fault, InvalidInput, shorten
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.tensors import DYNAMIC, ServedModel, Tensor
from falaj.serving.runtime.engine import (
    LONGEST_S,
    explained,
    require_declared_outputs,
    require_small_outputs,
)
from falaj.serving.runtime.probe import RunCost, measure
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]
Run = Callable[[Sequence[Array]], list[Array]]

_log = logging.getLogger(__name__)


class ModelContents(NamedTuple):
    """The verified bytes of a version: its model file, and the files that accompany it, by path."""

    model: bytes
    others: Mapping[str, bytes] = {}


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that a framework has opened: its tensors in the model's order, and a function that runs it."""

    platform: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    run: Run


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An opened model in this process, which is a worker's: nothing but the end of the process stops a run."""

    model: ServedModel
    cost: RunCost
    _run: Run
    in_process: bool = field(default=True, init=False)

    def close(self) -> None:
        return None

    def run(self, inputs: Sequence[Array], *, limit_s: float = LONGEST_S) -> list[Array]:
        """Return the outputs for `inputs`, both in the model's order."""
        try:
            outputs = self._run(inputs)
        except Exception as error:
            raise explained(error) from None
        require_small_outputs(outputs)
        require_declared_outputs(self.model, outputs)
        return outputs


def probed(file: ServedFile, opened: OpenedModel) -> OpenedEngine:
    """Return the engine of an opened model, named as it is registered, with its measured cost."""
    inputs = _declared(file, "inputs", file.inputs, opened.inputs)
    outputs = _declared(file, "outputs", file.outputs, opened.outputs)
    model = ServedModel(
        name=file.model, version=file.version, platform=opened.platform, inputs=inputs, outputs=outputs
    )
    cost = measure(model, opened.run, is_bounded=False, max_batch_rows=file.settings.max_batch_rows)
    _log.info("loaded %s@%s: %s", file.model, file.version, cost)
    return OpenedEngine(model, cost, opened.run)


def typed(outputs: Sequence[Array], tensors: Sequence[Tensor]) -> list[Array]:
    """Return the outputs in the types of their tensors, each in one piece of memory."""
    pairs = zip(outputs, tensors, strict=True)
    return [np.ascontiguousarray(array, NUMPY[tensor.datatype]) for array, tensor in pairs]


def not_opened(file: ServedFile, kind: str, error: BaseException) -> FalajError:
    """Return the error for a file that a framework cannot open. Raise MemoryError if that was the reason."""
    if isinstance(error, FalajError):
        return error
    if isinstance(error, MemoryError):
        raise error
    lines = str(error).strip().splitlines()
    reason = shorten(lines[0] if lines else type(error).__name__, limit=300)
    return InvalidInput(f"{file.model}@{file.version} is not {kind} that can be opened: {reason}")


def _declared(
    file: ServedFile, what: str, declared: Sequence[Tensor], found: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the tensors of the file under the names that the registered signature gives them.

    Raise InvalidInput if that says something else than the file.
    """
    if not declared:
        return tuple(found)
    if len(declared) != len(found) or not all(map(_agree, declared, found)):
        fault = Fault(
            where=what,
            given=", ".join(map(str, declared)),
            allowed=", ".join(map(str, found)),
            fix="register the model with the signature of its file, or without one",
        )
        raise InvalidInput(
            f"the registered signature of {file.model}@{file.version} is not that of its file", faults=[fault]
        )
    return tuple(
        tensor.model_copy(update={"name": named.name}) for named, tensor in zip(declared, found, strict=True)
    )


def _agree(declared: Tensor, found: Tensor) -> bool:
    return declared.datatype == found.datatype and (
        not declared.shape
        or (
            len(declared.shape) == len(found.shape)
            and all(
                DYNAMIC in pair or pair[0] == pair[1]
                for pair in zip(declared.shape, found.shape, strict=True)
            )
        )
    )
