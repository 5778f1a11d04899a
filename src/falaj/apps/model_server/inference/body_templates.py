"""Bodies that a connection has sent before, with other values: only the values are parsed again.

A client sends the same JSON around its values with every request. Once such a body was parsed and checked, the bytes
before and after its values are kept. A body with the same bytes around a list of numbers says the same about other
values, so name, datatype, shape and outputs need no second look. Anything else is parsed as a whole.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from falaj.apps.model_server.http.repeated_heads import RepeatedHead, RepeatedRequest, RequestWriter
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
MAX_GROUPED_BYTES = 4096
"""Larger bodies are answered one by one."""
KNOWN_PARAMETERS = frozenset(("binary_data_output", "binary_data", "binary_data_size"))
"""Parameters whose meaning the selected outputs and the place of the values hold; a body with others is not kept."""

_floats = msgspec.json.Decoder(list[float]).decode
_integers = msgspec.json.Decoder(list[int]).decode
_float_rows = msgspec.json.Decoder(list[list[float]]).decode
_integer_rows = msgspec.json.Decoder(list[list[int]]).decode
_LISTS: dict[Datatype, tuple[Callable[[Any], list[Any]], str, bytes]] = {
    Datatype.FP32: (_floats, "f", b"[0.5]"),
    Datatype.FP64: (_floats, "d", b"[0.5]"),
    Datatype.INT32: (_integers, "i", b"[5]"),
    Datatype.INT64: (_integers, "q", b"[5]"),
}
"""How a list of numbers is parsed and packed, and a list that stands in for another."""


class RowGroup(Protocol):
    """Requests of one row each that are answered together at the end of a turn of the event loop."""

    @property
    def has_place(self) -> bool: ...
    def add(self, request: RepeatedRequest) -> None: ...


@dataclass(slots=True)
class BodyTemplate:
    """A body around the values of its only tensor, and what it says about them."""

    target: PathTarget
    queue: BatchQueue
    selection: OutputSelection
    datatype: Datatype
    shape: tuple[int, ...]
    size: int
    is_json: bool
    start: bytes
    end: bytes
    read: Callable[[memoryview], Array | None]
    """Returns the values in the shape of the tensor, from what is between `start` and `end`."""
    group: RowGroup | None = None
    """The requests that such requests are answered together with, if they can be."""

    def repeat(self, writer: RequestWriter, head: RepeatedHead, body: bytes) -> RepeatedRequest | None:
        group, start, end, size = self.group, self.start, self.end, len(body)
        if (
            group is None
            or size > MAX_GROUPED_BYTES
            or not body.startswith(start)
            or not body.endswith(end)
            or not group.has_place
        ):
            return None
        values = body[len(start) : size - len(end)]
        if self.is_json:
            if values.find(b"]") != len(values) - 1 or values.rfind(b"["):  # more than one list
                return None
        elif len(values) != self.size * NUMPY[self.datatype].itemsize:
            return None
        request = RepeatedRequest(writer, head, body, values)
        group.add(request)
        return request

    def array_of(self, body: bytes) -> Array | None:
        """Return the values of a body; None if it is not like the one that was kept."""
        start, end = self.start, self.end
        if not body.startswith(start) or not body.endswith(end):
            return None
        try:
            return self.read(memoryview(body)[len(start) : len(body) - len(end)])
        except FAULTS:
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


ReadRows = Callable[[Sequence[bytes]], Array]
"""Returns the rows of several requests. Raises what `FAULTS` lists if one of them is not as it should be."""
FAULTS = (msgspec.DecodeError, ValueError, OverflowError, RecursionError, struct.error)


def rows_reader(datatype: Datatype, shape: tuple[int, ...], *, is_json: bool) -> ReadRows:
    """Return what reads the values of requests with one row each as one array."""
    width, dtype = int(np.prod(shape)), NUMPY[datatype]
    if not is_json:
        return lambda values: np.frombuffer(b"".join(values), dtype).reshape(len(values), *shape[1:])
    kind = _LISTS[datatype][1]
    decode: Callable[[bytes], list[list[Any]]] = _float_rows if dtype.kind == "f" else _integer_rows
    pack = lru_cache(maxsize=64)(lambda count: struct.Struct(f"<{count * width}{kind}").pack)

    def read(values: Sequence[bytes]) -> Array:
        rows = decode(b"[%b]" % b",".join(values))
        if list(map(len, rows)) != [width] * len(values):
            raise ValueError("a row has another number of values")
        return np.frombuffer(pack(len(rows))(*chain.from_iterable(rows)), dtype).reshape(
            len(rows), *shape[1:]
        )

    return read


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
    values = reader(datatype, shape, size)
    return BodyTemplate(target, queue, selection, datatype, shape, size, json_bytes is None, *around, values)


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
