"""Check the inputs of a request against a model's signature: names, datatypes, shapes and lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from math import prod
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from falaj.errors import Fault, InvalidInput, shorten
from falaj.records.serving.tensors import DYNAMIC, Datatype, ServedModel, Tensor
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]


MAX_FAULTS = 50
"""Faults of a request that are listed."""


class RequestTensor(Protocol):
    """A tensor of a request before its data is read."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...


G = TypeVar("G", bound=RequestTensor)
Reader = Callable[[G, Datatype, int], Array]
"""Reads the data of a tensor, given its datatype and number of values. Raises ValueError if it does not match."""


class Signature:
    """A model's inputs, prepared for fast checks."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._slots = {
            tensor.name: (number, tensor, list(tensor.shape[1:]))
            for number, tensor in enumerate(model.inputs)
        }
        self._blank: list[Array | None] = [None] * len(model.inputs)

    def take(self, given: Sequence[G], read: Reader[G]) -> list[Array]:
        """Return the request's arrays in the model's order. Raise InvalidInput with all faults."""
        arrays = self._blank.copy()
        for tensor in given if len(given) == len(arrays) else ():
            slot = self._slots.get(tensor.name)
            if slot is None:
                break
            number, wanted, tail = slot
            shape = tensor.shape
            if tensor.datatype != wanted.datatype or not (
                (shape[1:] == tail and wanted.shape[:1] == (DYNAMIC,) and shape and shape[0] > 0)
                or shape_fits(shape, wanted.shape)
            ):
                break
            try:
                array = read(tensor, wanted.datatype, prod(shape))
            except (ValueError, OverflowError):
                break
            arrays[number] = array if len(shape) == 1 else array.reshape(shape)
        taken = [array for array in arrays if array is not None]
        if len(taken) != len(arrays) or len(given) != len(arrays):
            raise self._refusal(given, read)
        return taken

    def _refusal(self, given: Sequence[G], read: Reader[G]) -> InvalidInput:
        wrong = (fault for tensor in given if (fault := self._fault(tensor, read)) is not None)
        faults = list(islice(wrong, MAX_FAULTS))
        times = Counter(tensor.name for tensor in given)
        faults += [_fault(name, "a duplicate", "each input once") for name in self._slots if times[name] > 1]
        faults += [
            _fault(name, "nothing", f"{tensor.datatype} {list(tensor.shape)}")
            for name, (_, tensor, _) in self._slots.items()
            if name not in times
        ]
        return invalid_request(faults)

    def _fault(self, tensor: G, read: Reader[G]) -> Fault | None:
        if tensor.name not in self._slots:
            known = ", ".join(str(wanted) for wanted in self.model.inputs)
            return _fault(tensor.name, "an unknown name", f"the inputs {known}")
        _, wanted, _ = self._slots[tensor.name]
        if tensor.datatype != wanted.datatype:
            return _fault(tensor.name, f"datatype {shorten(tensor.datatype)}", str(wanted.datatype))
        if not shape_fits(tensor.shape, wanted.shape):
            words = "; -1 is any number" if DYNAMIC in wanted.shape else ""
            return _fault(tensor.name, f"shape {shorten(tensor.shape)}", f"{list(wanted.shape)}{words}")
        return _data_fault(tensor, wanted, read)


def _data_fault(tensor: G, wanted: Tensor, read: Reader[G]) -> Fault | None:
    count = prod(tensor.shape)
    try:
        read(tensor, wanted.datatype, count)
    except (ValueError, OverflowError) as error:
        return _fault(tensor.name, f"data: {error}", f"{count} values of {wanted.datatype}")
    return None


def shape_fits(shape: Sequence[int], allowed: Sequence[int]) -> bool:
    """Return whether `shape` matches `allowed`. A request may have no rows; no other dimension may be 0."""
    return len(shape) == len(allowed) and all(
        (size > 0 or (size == 0 == place)) and wanted in (DYNAMIC, size)
        for place, (size, wanted) in enumerate(zip(shape, allowed, strict=True))
    )


def answer_to_no_rows(model: ServedModel, inputs: Sequence[Array]) -> list[Array] | None:
    """Return the outputs for inputs without rows, which no model has to run for; None if the inputs have rows.

    Raise InvalidInput if only some have none, or if an output of the model does not consist of rows.
    """
    if all(array.size for array in inputs):
        return None
    if any(not array.ndim or len(array) for array in inputs):
        raise InvalidInput("an input has no rows and another has some; allowed the same number in all")
    whole = [tensor for tensor in model.outputs if tensor.shape[:1] != (DYNAMIC,)]
    if whole:
        names = ", ".join(map(str, whole))
        raise InvalidInput(f"the inputs have no rows, and the model has outputs that need some: {names}")
    return [
        np.empty([0, *(max(size, 0) for size in tensor.shape[1:])], NUMPY[tensor.datatype])
        for tensor in model.outputs
    ]


def invalid_request(faults: Sequence[Fault]) -> InvalidInput:
    """Return one error with the faults of a request on one line, up to a number."""
    faults = faults[:MAX_FAULTS]
    words = "; ".join(f"{fault.where}: given {fault.given}, allowed {fault.allowed}" for fault in faults)
    return InvalidInput(words, faults=faults)


def _fault(name: str, given: str, allowed: str) -> Fault:
    return Fault(where=f"input '{shorten(name)}'", given=given, allowed=allowed)
