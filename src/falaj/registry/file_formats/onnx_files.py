"""Walk ONNX models, which are protobuf messages, as far as it takes to know that they name no other files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from falaj.registry.file_formats.range_reader import RangeReader

DEPTH_LIMIT = 100
LARGEST_TAG = 2**32 - 1
"""Readers drop the bits above, and so find another field than the one that is written."""
ORT_MARK = b"ORTM"
"""At byte 4, in a model of ONNX Runtime's own format: it would be read as that, and not as ONNX."""
FIRST_TAGS = (b"\x08", b"\x12", b"\x3a", b"\x42")
IR_VERSION, GRAPH, OPSET_IMPORT = 1, 7, 8
EXTERNAL_DATA, DATA_LOCATION = 13, 14
MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {
        5: "tensor",
        6: "graph",
        10: "tensor",
        11: "graph",
        22: "sparse tensor",
        23: "sparse tensor",
    },
    "sparse tensor": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
"""The fields of each message that lead to tensors (onnx.proto)."""
WITHOUT_FILES = (
    "keep the weights in the model: external_data=False in torch.onnx.export, or onnx.save_model(…)"
)


class MessageField(NamedTuple):
    """A field of a message: its number, the value of a number, and the place of other content."""

    number: int
    value: int | None
    start: int
    end: int


def is_onnx(reader: RangeReader) -> bool:
    """Return whether the file is an ONNX model. Raise InvalidInput if it keeps weights in other files."""
    if reader.at(0, 1) not in FIRST_TAGS or reader.at(4, len(ORT_MARK)) == ORT_MARK:
        return False
    try:
        fields = {field.number for field in message_fields(reader, 0, reader.size_bytes)}
        if not {IR_VERSION, GRAPH, OPSET_IMPORT} <= fields:
            return False
        names_files = _names_files(reader, "model", 0, reader.size_bytes)
    except EOFError:
        return False
    if names_files:
        raise reader.rejection("an ONNX model that reads its weights from other files", fix=WITHOUT_FILES)
    return True


def _names_files(reader: RangeReader, kind: str, start: int, end: int, depth: int = 0) -> bool:
    """Visit every message that leads to tensors, in the order of the file. Raise EOFError if one is not sound."""
    if depth > DEPTH_LIMIT:
        raise EOFError
    for field in message_fields(reader, start, end):
        if kind == "tensor" and (
            field.number == EXTERNAL_DATA or (field.number == DATA_LOCATION and field.value != 0)
        ):
            return True
        inner = MESSAGES[kind].get(field.number)
        if inner is not None:
            if field.value is not None:
                raise EOFError
            if _names_files(reader, inner, field.start, field.end, depth + 1):
                return True
    return False


def message_fields(reader: RangeReader, start: int, end: int) -> Iterator[MessageField]:
    """Yield the fields of a message. Raise EOFError if they do not end with it."""
    while start < end:
        tag, start = _varint(reader, start, end)
        number, kind = tag >> 3, tag & 7
        value = None
        if kind == 0:
            value, stop = _varint(reader, start, end)
        elif kind == 2:
            length, start = _varint(reader, start, end)
            stop = start + length
        elif kind in (1, 5):
            stop = start + (8 if kind == 1 else 4)
        else:
            raise EOFError
        if stop > end or number == 0 or tag > LARGEST_TAG:
            raise EOFError
        yield MessageField(number, value, start, stop)
        start = stop


def _varint(reader: RangeReader, start: int, end: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(reader.at(start, min(10, end - start))):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, start + place + 1
    raise EOFError
