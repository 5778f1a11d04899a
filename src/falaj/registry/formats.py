"""Recognize file formats by content; reject files that could run code when they are loaded."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

from falaj.errors import InvalidInput
from falaj.records.registry import FileFormat
from falaj.registry import archives, numpy_arrays
from falaj.registry.archives import USE_INSTEAD, archive_format
from falaj.registry.pickles import HEAD_BYTES, has_pickle_header, is_pickle
from falaj.registry.range_reader import RangeReader

SCANNED_BYTES = 512
SAFETENSORS_HEADER_LIMIT = 100_000_000
"""The limit of the safetensors library itself."""

PROTOBUF_FIELDS_LIMIT = 20_000

MAGIC = {
    b"ARROW1\x00\x00": FileFormat.ARROW,
    b"\xff\xff\xff\xff": FileFormat.ARROW,
    b"PAR1": FileFormat.PARQUET,
    b"CBM1": FileFormat.CATBOOST,
    b"tree\nversion=": FileFormat.LIGHTGBM,
}
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x5d\x00\x00": "lzma",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"ZF0x": "joblib",
    b"\x78\x01": "zlib",
    b"\x78\x5e": "zlib",
    b"\x78\x9c": "zlib",
    b"\x78\xda": "zlib",
}


def recognize(reader: RangeReader) -> FileFormat:
    """Return the format of a file. Raise InvalidInput, with a fix, if it is not allowed."""
    head = reader.at(0, SCANNED_BYTES)
    if has_pickle_header(head):
        raise reader.rejection("a pickle; loading it runs code", fix=USE_INSTEAD)
    if head.startswith(archives.MAGIC):
        return archive_format(reader)
    if numpy_arrays.is_array(head):
        return _array(reader)
    if head[4:8] == b"TFL3":
        return FileFormat.LITERT
    for magic, found in MAGIC.items():
        if head.startswith(magic):
            return found
    if _is_safetensors(reader, head):
        return FileFormat.SAFETENSORS
    if _is_onnx(reader):
        return FileFormat.ONNX
    if head[:1] == b"{" and b"learner" in head[:64]:
        return FileFormat.XGBOOST
    return _text(reader, head)


def model_format(found: Sequence[FileFormat]) -> FileFormat:
    """Return the format of a version from the formats of its files. Raise InvalidInput unless there is exactly one."""
    models = sorted({each for each in found if each.is_model})
    if len(models) == 1:
        return models[0]
    given = " and ".join(models) if models else ", ".join(sorted(set(found)))
    raise InvalidInput.at("files", given=given, allowed="files of exactly one model format")


def _array(reader: RangeReader) -> FileFormat:
    if numpy_arrays.holds_objects(reader.at(0, numpy_arrays.HEADER_LIMIT + 12)):
        raise reader.rejection(
            "a NumPy array that can hold Python objects, which are pickled", fix=USE_INSTEAD
        )
    return FileFormat.NUMPY


def _is_safetensors(reader: RangeReader, head: bytes) -> bool:
    length = int.from_bytes(head[:8], "little")
    if len(head) < 10 or head[8:9] != b"{" or length >= 2**56:
        return False
    if length > SAFETENSORS_HEADER_LIMIT:
        raise reader.rejection(f"safetensors with a header of {length} bytes")
    if 8 + length > reader.size_bytes:
        raise reader.rejection(
            f"truncated safetensors: the header has {length} bytes, the file {reader.size_bytes}"
        )
    end = reader.at(max(8, 8 + length - SCANNED_BYTES), min(length, SCANNED_BYTES))
    return end.rstrip(b" ").endswith(b"}")


IR_VERSION, GRAPH, OPSET_IMPORT = 1, 7, 8


def _is_onnx(reader: RangeReader) -> bool:
    """Return whether the file is one protobuf message with the fields of an ONNX model."""
    if reader.at(0, 1) not in (b"\x08", b"\x12", b"\x3a", b"\x42"):
        return False
    try:
        fields = set(_protobuf_fields(reader))
    except EOFError:
        return False
    return {IR_VERSION, GRAPH, OPSET_IMPORT} <= fields


def _protobuf_fields(reader: RangeReader) -> Iterator[int]:
    """Yield the numbers of the top-level fields. Raise EOFError if they do not end with the file."""
    offset = 0
    for _ in range(PROTOBUF_FIELDS_LIMIT):
        if offset == reader.size_bytes:
            return
        tag, offset = _varint(reader, offset)
        kind = tag & 7
        if kind == 0:
            _, offset = _varint(reader, offset)
        elif kind == 2:
            length, offset = _varint(reader, offset)
            offset += length
        elif kind in (1, 5):
            offset += 8 if kind == 1 else 4
        else:
            raise EOFError
        if offset > reader.size_bytes:
            raise EOFError
        yield tag >> 3
    raise EOFError


def _varint(reader: RangeReader, offset: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(reader.at(offset, 10)):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, offset + place + 1
    raise EOFError


def _text(reader: RangeReader, head: bytes) -> FileFormat:
    """Recognize JSON or text; reject everything else."""
    walked = reader.at(0, HEAD_BYTES)
    if is_pickle(walked, complete=len(walked) == reader.size_bytes):
        raise reader.rejection("a pickle; loading it runs code", fix=USE_INSTEAD)
    if _is_utf8(head):
        return FileFormat.JSON if head.lstrip()[:1] in (b"{", b"[") else FileFormat.TEXT
    packed = next((name for magic, name in COMPRESSED.items() if head.startswith(magic)), None)
    if packed is None:
        raise reader.rejection("of an unknown format")
    why = f"compressed ({packed}), so its content cannot be inspected; joblib stores pickles this way"
    raise reader.rejection(why, fix=USE_INSTEAD)


def _is_utf8(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character in "\t\n\r\f" for character in text)
