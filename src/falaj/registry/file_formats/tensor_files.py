"""Parse the header of safetensors files."""

from __future__ import annotations

import math
from typing import Any

from falaj.errors import shorten
from falaj.registry.file_formats.range_reader import RangeReader
from falaj.registry.file_formats.strict_json import parse_json

HEADER_LIMIT = 100_000_000
"""The limit of the safetensors library itself."""
PIECE_BYTES = 4 << 20
METADATA = "__metadata__"
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def is_safetensors(reader: RangeReader, head: bytes) -> bool:
    """Return whether the file is one of safetensors. Raise InvalidInput if it begins like one and is unsound."""
    length = int.from_bytes(head[:8], "little")
    if len(head) < 10 or head[8:9] != b"{" or length >= 2**56:
        return False
    if length > HEADER_LIMIT:
        raise reader.rejection(f"safetensors with a header of {length} bytes")
    if 8 + length > reader.size_bytes:
        raise reader.rejection(
            f"truncated safetensors: the header has {length} bytes, the file {reader.size_bytes}"
        )
    pieces = [
        reader.at(8 + place, min(PIECE_BYTES, length - place)) for place in range(0, length, PIECE_BYTES)
    ]
    try:
        _require_tensors(parse_json(b"".join(pieces)), reader.size_bytes - 8 - length)
    except ValueError as error:
        raise reader.rejection(f"safetensors with an unsound header: {shorten(str(error))}") from None
    return True


def _require_tensors(header: Any, data_bytes: int) -> None:
    """Raise ValueError unless the tensors fill the data without holes or overlaps, as the library demands."""
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} that is not text")
    spans = sorted(_span(name, tensor) for name, tensor in header.items())
    place = 0
    for begin, end in spans:
        if begin != place:
            raise ValueError(f"tensors that overlap or leave a hole at byte {min(begin, place)}")
        place = end
    if place != data_bytes:
        raise ValueError(f"tensors of {place} bytes in {data_bytes} bytes of data")


def _span(name: str, tensor: Any) -> tuple[int, int]:
    if not isinstance(tensor, dict) or set(tensor) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name}: not a tensor")
    shape, offsets = tensor["shape"], tensor["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or tensor["dtype"] not in BITS:
        raise ValueError(f"{name}: an unknown dtype, shape or place")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * BITS[tensor["dtype"]]:
        raise ValueError(f"{name}: not as many bytes as its shape says")
    return begin, end


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in values)
