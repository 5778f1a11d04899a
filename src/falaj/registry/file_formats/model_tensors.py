"""Read the inputs and outputs of a model from its file: those of an ONNX graph, and the shape of a tree model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from falaj.errors import InvalidInput
from falaj.ports.parsers import ByteSource, Parsed
from falaj.records.registry import FileFormat
from falaj.registry.file_formats.onnx_files import MessageField, message_fields
from falaj.registry.file_formats.range_reader import RangeReader

GRAPH, INITIALIZER, INPUT, OUTPUT = 7, 5, 11, 12
TENSOR_NAME = 8
ELEMENTS = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    8: "string",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
}
"""Element types of tensors, by their number in onnx.proto."""
LARGEST_DIMENSION = 2**40
NAME_BYTES, MOST_TENSORS = 1024, 1000
SCANNED_BYTES = 256 << 10
"""The parameters of an XGBoost model lie at one of its ends, those of LightGBM at its beginning."""


def parse_model_tensors(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The parser of signatures, see ports/parsers.py: inputs and outputs, or the facts of a tree model."""
    (source,) = sources
    reader = RangeReader(options["path"], source.size_bytes, source.read_range)
    if options["format"] == FileFormat.ONNX:
        return Parsed(onnx_tensors(reader))
    return Parsed(tree_facts(reader, options["format"]))


# ---------------------------------------------------------------------------------------------------- ONNX


def onnx_tensors(reader: RangeReader) -> dict[str, Any]:
    """Return the inputs that a caller gives, and the outputs. Raise InvalidInput where one is not a tensor."""
    inputs: list[dict[str, Any]] = []
    outputs: list[dict[str, Any]] = []
    initialized: set[str] = set()
    try:
        for graph in message_fields(reader, 0, reader.size_bytes):
            if graph.number != GRAPH:
                continue
            for field in message_fields(reader, graph.start, graph.end):
                if field.number == INITIALIZER:
                    initialized.add(_name(reader, field, TENSOR_NAME))
                elif field.number in (INPUT, OUTPUT):
                    (inputs if field.number == INPUT else outputs).append(_tensor(reader, field))
    except EOFError:
        raise reader.rejection("an ONNX model that ends too early") from None
    # Before IR version 4 weights are listed among the inputs, with a value that a caller need not give.
    given = [each for each in inputs if each["name"] not in initialized]
    if not given or not outputs or len(given) + len(outputs) > MOST_TENSORS:
        raise reader.rejection(f"an ONNX model with {len(given)} inputs and {len(outputs)} outputs")
    return {"inputs": given, "outputs": outputs}


def _tensor(reader: RangeReader, field: MessageField) -> dict[str, Any]:
    """Return a ValueInfoProto as a tensor; without a shape where the file gives none."""
    name, kind = _name(reader, field, 1), None
    for part in message_fields(reader, field.start, field.end):
        if part.number == 2:  # the type
            kind = next((each for each in message_fields(reader, part.start, part.end)), None)
    if kind is None or kind.number != 1:
        raise InvalidInput.at(
            f"{reader.name}: {name}",
            given="a sequence or a map" if kind is not None else "no type",
            allowed="inputs and outputs that are tensors",
            fix="convert the model with outputs as tensors: zipmap=False in skl2onnx, or fj.export_onnx",
        )
    dtype, shape = None, None
    for part in message_fields(reader, kind.start, kind.end):
        if part.number == 1:
            dtype = ELEMENTS.get(part.value or 0)
        elif part.number == 2:
            shape = list(_dimensions(reader, part))
    if dtype is None:
        raise reader.rejection(f"an ONNX model whose tensor {name} has a type that is not known")
    return {"name": name, "dtype": dtype, "shape": shape}


def _dimensions(reader: RangeReader, shape: MessageField) -> Iterator[int]:
    for dimension in message_fields(reader, shape.start, shape.end):
        sizes = [
            each.value
            for each in message_fields(reader, dimension.start, dimension.end)
            if each.number == 1 and each.value is not None
        ]
        size = sizes[-1] if sizes else -1
        yield size if 0 < size <= LARGEST_DIMENSION else -1


def _name(reader: RangeReader, field: MessageField, number: int) -> str:
    for part in message_fields(reader, field.start, field.end):
        if part.number == number and part.value is None:
            if part.end - part.start > NAME_BYTES:
                raise reader.rejection(f"an ONNX model with a name of {part.end - part.start} bytes")
            return reader.at(part.start, part.end - part.start).decode(errors="replace")
    return ""


# --------------------------------------------------------------------------------------------------- trees


def tree_facts(reader: RangeReader, kind: str) -> dict[str, Any]:
    """Return layout, booster and objective, and the numbers of features (none: not found) and classes (1: none)."""
    head = reader.at(0, SCANNED_BYTES)
    content = head + reader.at(max(len(head), reader.size_bytes - SCANNED_BYTES), SCANNED_BYTES)
    if kind == FileFormat.LIGHTGBM:
        features = _number(content, rb"\nmax_feature_idx=(\d{1,9})\n")
        return {
            "layout": "text",
            "features": None if features is None else features + 1,
            "classes": _number(content, rb"\nnum_class=(\d{1,6})\n") or 1,
            "objective": _word(content, rb"\nobjective=([a-z_]{1,64})"),
            "booster": "gbtree",
        }
    # UBJ writes a text as S, its length as a number (L: eight bytes, i and others: one), and the text.
    gap = rb'(?:"\s*:\s*"|S(?:L.{8}|[iU].))'
    end = rb'(?:"|[^0-9])'
    return {
        "layout": "json" if re.match(rb"\{\s*\"", head) else "ubj",
        "features": _number(content, rb"num_feature" + gap + rb"(\d{1,9})" + end),
        "classes": _number(content, rb"num_class" + gap + rb"(\d{1,6})" + end) or 1,
        "objective": _word(content, rb"name" + gap + rb"([a-z]{1,16}:[a-z]{1,32})"),
        "booster": _word(content, rb"name" + gap + rb"(gbtree|gblinear|dart)"),
    }


def _number(content: bytes, pattern: bytes) -> int | None:
    found = re.findall(pattern, content, re.DOTALL)
    return int(found[-1]) if found else None


def _word(content: bytes, pattern: bytes) -> str | None:
    found = re.findall(pattern, content, re.DOTALL)
    return found[-1].decode() if found else None
