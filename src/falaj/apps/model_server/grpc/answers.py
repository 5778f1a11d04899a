"""Answers to inference as bytes: messages whose constant parts are encoded once, and whole answers of one row."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from falaj.apps.model_server.grpc.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame_start
from falaj.apps.model_server.grpc.headers import OK, RESPONSE
from falaj.apps.model_server.inference.classification import classify
from falaj.apps.model_server.inference.protocol import OutputSelection
from falaj.records.serving.tensors import Datatype, ServedModel
from falaj.serving.tensors import NUMPY, to_bytes

Array = npt.NDArray[Any]
OutputKey = tuple[int, Datatype, tuple[int, ...]]
"""What the description of an output in a response depends on."""
Pack = Callable[[int, bytes, bytes], bytes]
"""Packs an answer on a stream, with the id of its prediction and the bytes of its row."""

CACHED_SHAPES = 1000
MAX_ROW_VALUES = 64
"""Values of a row that is packed; the copies of longer ones cost more than what is around them."""

_PREFIX = Struct(">BL")


class InferWriter:
    """Writes the responses of one version of an endpoint; constant parts are encoded once."""

    def __init__(self, endpoint: str, model: ServedModel) -> None:
        self._start = text_field(1, endpoint) + text_field(2, model.version)
        self._model = model
        self._tensors = [(tensor.datatype, text_field(1, tensor.name)) for tensor in model.outputs]
        self._outputs: dict[OutputKey, bytes] = {}
        self.rows = self._row_packer()

    def write(
        self,
        request: str,
        prediction: str,
        outputs: Sequence[Array],
        selection: OutputSelection,
        *,
        notes: bytes = b"",
    ) -> bytes:
        """Return the response. Its id is that of the request, else that of the prediction. `notes` are parameters."""
        parts = [self._start]
        if request:
            parts.append(text_field(3, request))
            if prediction:
                notes = parameter("prediction", prediction) + notes
        elif prediction:
            parts.append(text_field(3, prediction))
        if notes:
            parts.append(notes)
        contents = []
        for number, _, classes in selection:
            array, datatype = outputs[number], self._tensors[number][0]
            if classes:
                array, datatype = classify(array, self._model.outputs[number], classes), Datatype.BYTES
            key = (number, datatype, array.shape)
            parts.append(self._outputs.get(key) or self._describe(key))
            contents.append(bytes_field(6, to_bytes(array, datatype)))
        return b"".join((*parts, *contents))

    def _describe(self, key: OutputKey) -> bytes:
        number, datatype, shape = key
        if len(self._outputs) > CACHED_SHAPES:
            self._outputs.clear()
        sizes = b"".join(map(varint, shape))
        name = self._tensors[number][1]
        about = bytes_field(5, name + text_field(2, datatype) + bytes_field(3, sizes))
        return self._outputs.setdefault(key, about)

    def _row_packer(self) -> RowPacker | None:
        """Return what packs answers of one row, if the model has one output of a few numbers a row."""
        if len(self._model.outputs) != 1:
            return None
        (tensor,) = self._model.outputs
        if (
            tensor.datatype is Datatype.BYTES
            or len(tensor.shape) != 2
            or not 0 < tensor.shape[1] <= MAX_ROW_VALUES
        ):
            return None
        about = self._describe((0, tensor.datatype, (1, tensor.shape[1])))
        return RowPacker(self._start, about, tensor.shape[1], tensor.datatype)


class RowPacker:
    """Packs whole answers of one row: frames, message and trailers are constant but for the stream, id and values."""

    def __init__(self, start: bytes, about: bytes, width: int, datatype: Datatype) -> None:
        """`start` are the fields of every response, `about` the one that describes the output."""
        self._start = start
        self._about = about
        self._width = width
        self._datatype = datatype
        self._row_bytes = len(to_bytes(np.zeros((1, width), NUMPY[datatype]), datatype))
        self._packs: dict[int, Pack] = {}

    def rows(self, outputs: Sequence[Array]) -> list[bytes] | None:
        """Return the bytes of each row; None if the output is not what the model has declared."""
        (array,) = outputs
        if array.ndim != 2 or array.shape[1] != self._width:
            return None
        data, size = to_bytes(array, self._datatype), self._row_bytes
        return [data[at : at + size] for at in range(0, len(data), size)]

    def pack(self, stream: int, prediction: str, row: bytes) -> bytes:
        """Return the frames of an answer; its id is that of the prediction, if it has one."""
        ident = prediction.encode()
        pack = self._packs.get(len(ident)) or self._make(len(ident))
        return pack(stream, ident, row)

    def _make(self, ids: int) -> Pack:
        """Return what packs answers whose prediction has an id of so many bytes."""
        before_id = self._start + (bytes((3 << 3 | 2,)) + varint(ids) if ids else b"")
        before_row = self._about + bytes((6 << 3 | 2,)) + varint(self._row_bytes)
        size = len(before_id) + ids + len(before_row) + self._row_bytes
        head = frame_start(HEADERS, END_HEADERS, len(RESPONSE))
        data = RESPONSE + frame_start(DATA, 0, _PREFIX.size + size)
        message = _PREFIX.pack(0, size) + before_id
        tail = frame_start(HEADERS, END_HEADERS | END_STREAM, len(OK))
        parts = f"{len(message)}s{ids}s{len(before_row)}s{self._row_bytes}s"
        layout = Struct(f">{len(head)}sL{len(data)}sL{parts}{len(tail)}sL{len(OK)}s").pack

        def pack(stream: int, ident: bytes, row: bytes) -> bytes:
            return layout(head, stream, data, stream, message, ident, before_row, row, tail, stream, OK)

        if len(self._packs) > CACHED_SHAPES:
            self._packs.clear()
        self._packs[ids] = pack
        return pack


def notes_of(notes: bytes) -> bytes:
    """Return parameters of a response, as `encode_parameters` writes them, as fields of the message."""
    found: dict[str, object] = msgspec.json.decode(b"{%b}" % notes) if notes else {}
    return b"".join(parameter(name, value) for name, value in found.items())


def parameter(name: str, value: object) -> bytes:
    """Return a parameter of a response as an entry of its map."""
    if isinstance(value, bool):
        choice = b"\x08" + varint(int(value))
    elif isinstance(value, float):
        choice = b"\x21" + struct.pack("<d", value)
    elif isinstance(value, int):
        choice = b"\x10" + varint(value & (2**64 - 1))
    else:
        choice = text_field(3, str(value))
    return bytes_field(4, text_field(1, name) + bytes_field(2, choice))


def text_field(number: int, text: str) -> bytes:
    return bytes_field(number, text.encode())


def bytes_field(number: int, data: bytes) -> bytes:
    size = len(data)
    if size < 128:
        return bytes((number << 3 | 2, size)) + data
    return bytes((number << 3 | 2,)) + varint(size) + data


def varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    coded = bytearray()
    while value >= 128:
        coded.append(value & 127 | 128)
        value >>= 7
    coded.append(value)
    return bytes(coded)
