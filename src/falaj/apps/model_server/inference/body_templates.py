"""Bodies that a connection has sent before, with other values: only the values are parsed again.

A client sends the same JSON around its values with every request. Once such a body was parsed and checked, the bytes
before and after its values are kept. A body with the same bytes around a list of numbers says the same about other
values, so name, datatype, shape and outputs need no second look. Anything else is parsed as a whole.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from falaj.apps.model_server.inference.paths import PathTarget
from falaj.apps.model_server.inference.protocol import (
    LONG_JSON_BYTES,
    InferRequest,
    OutputSelection,
    read_request,
)
from falaj.errors import InvalidInput
from falaj.records.serving.tensors import Datatype
from falaj.serving.runtime.batch_queue import BatchQueue
from falaj.serving.tensors import NUMPY, PACKED, from_bytes

Array = npt.NDArray[Any]

MAX_CONSTANT_BYTES = 4096
"""Larger bodies around the values are not kept."""
KNOWN_PARAMETERS = frozenset(("binary_data_output", "binary_data", "binary_data_size"))
"""Parameters whose meaning the selected outputs and the place of the values hold; a body with others is not kept."""

_floats = msgspec.json.Decoder(list[float]).decode
_integers = msgspec.json.Decoder(list[int]).decode
_LISTS: dict[Datatype, tuple[Callable[[Any], list[Any]], str, bytes]] = {
    Datatype.FP32: (_floats, "f", b"[0.5]"),
    Datatype.FP64: (_floats, "d", b"[0.5]"),
    Datatype.INT32: (_integers, "i", b"[5]"),
    Datatype.INT64: (_integers, "q", b"[5]"),
}
"""How a list of numbers is parsed and packed, and a list that stands in for another."""


@dataclass(frozen=True, slots=True)
class BodyTemplate:
    """A body around the values of its only tensor, and what it says about them."""

    target: PathTarget
    queue: BatchQueue
    selection: OutputSelection
    start: bytes
    end: bytes
    read: Callable[[memoryview], Array | None]
    """Returns the values in the shape of the tensor, from what is between `start` and `end`."""

    def array_of(self, body: bytes) -> Array | None:
        """Return the values of a body; None if it is not like the one that was kept."""
        start, end = self.start, self.end
        if not body.startswith(start) or not body.endswith(end):
            return None
        try:
            return self.read(memoryview(body)[len(start) : len(body) - len(end)])
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError, struct.error):
            return None


def _list_reader(
    datatype: Datatype, shape: tuple[int, ...], size: int
) -> Callable[[memoryview], Array | None]:
    """Return what reads `size` numbers of a JSON list."""
    decode, kind, _ = _LISTS[datatype]
    pack, dtype, frombuffer = struct.Struct(f"<{size}{kind}").pack, NUMPY[datatype], np.frombuffer

    def read(text: memoryview) -> Array | None:
        if len(text) > LONG_JSON_BYTES:
            return None
        values = decode(text)
        return frombuffer(pack(*values), dtype).reshape(shape) if len(values) == size else None

    return read


def _bytes_reader(
    datatype: Datatype, shape: tuple[int, ...], size: int
) -> Callable[[memoryview], Array | None]:
    return lambda values: from_bytes(values, datatype, size).reshape(shape)


def kept_body(
    body: bytes,
    json_bytes: int | None,
    request: InferRequest,
    target: PathTarget,
    queue: BatchQueue,
    selection: OutputSelection,
) -> BodyTemplate | None:
    """Return the template of a body that was accepted; None if it is not to be kept."""
    served = target.served
    chosen = served is not None and (target.version is not None or len(served.queues) == 1)
    if not chosen or len(request.inputs) != 1 or request.id or not _has_known_parameters(request):
        return None
    tensor = request.inputs[0]
    datatype, shape = Datatype(tensor.datatype), tuple(tensor.shape)
    size = int(np.prod(shape))
    if json_bytes is None:
        around = _around_values(body, request, datatype)
    else:
        around = (body[:json_bytes], b"") if isinstance(tensor.data, memoryview) else None
    if around is None or len(around[0]) + len(around[1]) > MAX_CONSTANT_BYTES or not 0 < size <= PACKED:
        return None
    reader = _list_reader if json_bytes is None else _bytes_reader
    return BodyTemplate(target, queue, selection, *around, reader(datatype, shape, size))


def _has_known_parameters(request: InferRequest) -> bool:
    parts = (request, *request.inputs, *(request.outputs or ()))
    return all(part.parameters is None or part.parameters.keys() <= KNOWN_PARAMETERS for part in parts)


def _around_values(body: bytes, request: InferRequest, datatype: Datatype) -> tuple[bytes, bytes] | None:
    """Return the bytes before and after the values of a JSON body.

    The same bytes may occur elsewhere in it. So another list is put in their place: only if this changes the values,
    and nothing else, are they the values.
    """
    if datatype not in _LISTS or len(body) > LONG_JSON_BYTES:
        return None
    values, other = bytes(request.inputs[0].data), _LISTS[datatype][2]
    if not values.startswith(b"[") or values == other:
        return None
    for at in {body.find(values), body.rfind(values)} - {-1}:
        start, end = body[:at], body[at + len(values) :]
        try:
            changed = read_request(start + other + end, None)
        except InvalidInput:
            continue
        if bytes(changed.inputs[0].data) == other and _without_values(changed) == _without_values(request):
            return start, end
    return None


def _without_values(request: InferRequest) -> list[object]:
    (tensor,) = request.inputs
    return [
        *(tensor.name, tensor.shape, tensor.datatype, tensor.parameters),
        *(request.id, request.parameters, request.outputs),
    ]
