"""Messages between the model server and its prediction log: each is its length in four bytes, then MessagePack."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from falaj.records.serving.tensors import ServedModel
from falaj.serving.dependencies import PredictedBatch

Array = npt.NDArray[Any]

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 2**20
"""More than the inputs and outputs of any run."""


class BatchOpened(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """A batch of predictions that one version of an endpoint makes from now on; `model` is a ServedModel in JSON."""

    ident: str
    endpoint: str
    version: str
    model: bytes
    registered: str
    views: tuple[str, ...]
    features: tuple[str, ...]


class TensorValues(msgspec.Struct, array_like=True, frozen=True):
    """An array: the bytes of its numbers, or its texts."""

    dtype: str
    shape: tuple[int, ...]
    values: bytes | list[str]


class RowsAnswered(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Requests of the batch `ident` that were answered in one run: one item each, and the arrays of all.

    What all of them have in common is sent once: no `counts` if each has one row, no `requests` if none has an id of
    its own, and one of `callers` if it is the same.
    """

    ident: str
    at_us: int
    numbers: list[int]
    counts: list[int]
    callers: list[str]
    requests: list[str]
    inputs: list[TensorValues]
    outputs: list[TensorValues]


class BatchClosed(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """A batch gets no more ids; `given` were given out. It is stored once all of them were answered."""

    ident: str
    given: int


class BatchStored(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """A batch is on disk, and can be found."""

    ident: str


class RowsLost(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Rows that will not be stored; of a whole batch if `ident` is not empty."""

    endpoint: str
    version: str
    rows: int
    ident: str = ""


ToLog = BatchOpened | RowsAnswered | BatchClosed
FromLog = BatchStored | RowsLost

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToLog | FromLog) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def tensor_values(arrays: Sequence[Array]) -> list[TensorValues]:
    return [
        TensorValues("O", array.shape, [_text(value) for value in array.ravel().tolist()])
        if array.dtype == object
        else TensorValues(array.dtype.str, array.shape, array.tobytes())
        for array in arrays
    ]


def rows_answered(ident: str, numbers: list[int], batch: PredictedBatch) -> RowsAnswered:
    """Return the message about an answered batch whose requests have these numbers in the batch `ident` of the log."""
    alike = len(set(batch.callers)) == 1
    return RowsAnswered(
        ident,
        int(batch.at.timestamp() * 1e6),
        numbers,
        [] if batch.rows == len(numbers) else list(batch.counts),
        [batch.callers[0]] if alike else list(batch.callers),
        list(batch.requests) if any(batch.requests) else [],
        tensor_values(batch.inputs),
        tensor_values(batch.outputs),
    )


def answered_batch(message: RowsAnswered, model: ServedModel, endpoint: str) -> PredictedBatch:
    """Return the batch of a message. Raise ValueError if its tensors are none."""
    size = len(message.numbers)
    return PredictedBatch(
        model,
        datetime.fromtimestamp(message.at_us / 1e6, UTC),
        endpoint,
        (),
        message.counts or [1] * size,
        message.callers * size if len(message.callers) == 1 else message.callers,
        message.requests or [""] * size,
        [array_of(tensor) for tensor in message.inputs],
        [array_of(tensor) for tensor in message.outputs],
    )


def array_of(tensor: TensorValues) -> Array:
    """Return the array of a message. Raise ValueError if its parts do not agree."""
    if isinstance(tensor.values, list):
        return np.array(tensor.values, np.object_).reshape(tensor.shape)
    dtype = np.dtype(tensor.dtype)
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of {tensor.dtype}")
    return np.frombuffer(tensor.values, dtype).reshape(tensor.shape)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class FrameReader:
    """Cuts received bytes into messages."""

    def __init__(self, kinds: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that `data` completes. Raise ValueError if it is none."""
        rest = self._rest
        rest += data
        at = 0
        while len(rest) - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(rest, at)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a message of {size} bytes, where {MAX_FRAME_BYTES} are allowed")
            end = at + LENGTH.size + size
            if end > len(rest):
                break
            yield self._decode(bytes(rest[at + LENGTH.size : end]))
            at = end
        del rest[:at]
