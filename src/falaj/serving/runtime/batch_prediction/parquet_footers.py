"""Join Parquet files byte after byte: their row groups stay as they are, and one footer describes all of them.

pyarrow encodes each part by itself, so that all cores can do so at once; nothing is decoded or encoded again to make
one file of the parts. A footer is a Thrift struct in the compact protocol. It is read field by field, the offsets in it
are moved, and everything else is written as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from falaj.errors import Damaged

MAGIC = b"PAR1"
TAIL_BYTES = 8
"""The length of the footer, and the magic bytes."""

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_INTEGERS = (_I16, _I32, _I64)

# The numbers of the fields in parquet.thrift.
_NUM_ROWS, _ROW_GROUPS = 3, 4
_COLUMNS, _GROUP_ROWS, _GROUP_OFFSET, _ORDINAL = 1, 3, 5, 7
_CHUNK_OFFSET, _CHUNK_METADATA, _OFFSET_INDEX, _COLUMN_INDEX = 2, 3, 4, 6
_PAGE_OFFSETS = (9, 10, 11, 14)
"""Of data pages, index pages, the dictionary page and the Bloom filter."""


class _Field(NamedTuple):
    """A field of a struct: its number, its type, and its value; binaries and nested values stay bytes."""

    number: int
    kind: int
    value: int | bytes


def footer_of(part: bytes | memoryview) -> bytes:
    """Return the footer of a whole Parquet file in memory."""
    size = int.from_bytes(part[-TAIL_BYTES:-4], "little")
    if bytes(part[-4:]) != MAGIC or size + TAIL_BYTES + 4 > len(part):
        raise Damaged("a part of the predictions is not a Parquet file")
    return bytes(part[-TAIL_BYTES - size : -TAIL_BYTES])


def joined_footer(parts: Iterable[tuple[bytes, int]]) -> bytes:
    """Return the end of a file that has all row groups of the parts: each is a footer, and how far it was moved."""
    first: list[_Field] = []
    groups: list[bytes] = []
    rows = 0
    for footer, moved in parts:
        fields = list(_fields(_Reader(footer)))
        first = first or fields
        for group in _structs(next((f.value for f in fields if f.number == _ROW_GROUPS), b"")):
            group_fields = list(_fields(_Reader(group)))
            rows += sum(int(f.value) for f in group_fields if f.number == _GROUP_ROWS)
            groups.append(_moved_group(group_fields, moved))
    content = _struct(
        field._replace(value=_list_of_structs(groups))
        if field.number == _ROW_GROUPS
        else field._replace(value=rows)
        if field.number == _NUM_ROWS
        else field
        for field in first
    )
    return content + len(content).to_bytes(4, "little") + MAGIC


def _moved_group(fields: list[_Field], moved: int) -> bytes:
    """Return a row group whose bytes lie `moved` bytes later, without its number among those of its part."""
    kept = [field for field in fields if field.number != _ORDINAL]
    return _struct(
        field._replace(value=_list_of_structs([_moved_chunk(each, moved) for each in _structs(field.value)]))
        if field.number == _COLUMNS
        else _shifted(field, (_GROUP_OFFSET,), moved)
        for field in kept
    )


def _moved_chunk(chunk: bytes, moved: int) -> bytes:
    return _struct(
        field._replace(value=_moved_metadata(field.value, moved))
        if field.number == _CHUNK_METADATA and isinstance(field.value, bytes)
        else _shifted(field, (_CHUNK_OFFSET, _OFFSET_INDEX, _COLUMN_INDEX), moved)
        for field in _fields(_Reader(chunk))
    )


def _moved_metadata(metadata: bytes, moved: int) -> bytes:
    return _struct(_shifted(field, _PAGE_OFFSETS, moved) for field in _fields(_Reader(metadata)))


def _shifted(field: _Field, numbers: tuple[int, ...], moved: int) -> _Field:
    """Return the field, moved if it is one of these offsets; 0 stands for an offset that is not given."""
    if field.number in numbers and isinstance(field.value, int) and field.value > 0:
        return field._replace(value=field.value + moved)
    return field


# -------------------------------------------------------------------------- the compact protocol


class _Reader:
    """Reads values from bytes; Damaged where they end too early."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.at = 0

    def byte(self) -> int:
        if self.at >= len(self._content):
            raise Damaged("the footer of a part of the predictions is cut off")
        self.at += 1
        return self._content[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def zigzag(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def skip(self, size: int) -> None:
        if self.at + size > len(self._content):
            raise Damaged("the footer of a part of the predictions is cut off")
        self.at += size

    def since(self, start: int) -> bytes:
        return self._content[start : self.at]


def _fields(reader: _Reader) -> Iterator[_Field]:
    number = 0
    while header := reader.byte():
        kind, delta = header & 0x0F, header >> 4
        number = number + delta if delta else reader.zigzag()
        if kind in _INTEGERS:
            yield _Field(number, kind, reader.zigzag())
        else:
            start = reader.at
            if kind not in (_TRUE, _FALSE):  # the type is the value
                _skip(reader, kind)
            yield _Field(number, kind, reader.since(start))


def _skip(reader: _Reader, kind: int) -> None:
    if kind in _INTEGERS:
        reader.varint()
    elif kind in (_TRUE, _FALSE, _BYTE):
        reader.skip(1)
    elif kind == _DOUBLE:
        reader.skip(8)
    elif kind == _BINARY:
        reader.skip(reader.varint())
    elif kind in (_LIST, _SET):
        element, size = _list_header(reader)
        for _ in range(size):
            _skip(reader, element)
    elif kind == _MAP:
        size = reader.varint()
        kinds = reader.byte() if size else 0
        for _ in range(size):
            _skip(reader, kinds >> 4)
            _skip(reader, kinds & 0x0F)
    elif kind == _STRUCT:
        for _ in _fields(reader):
            pass
    else:
        raise Damaged(f"the footer of a part of the predictions has a field of the unknown type {kind}")


def _list_header(reader: _Reader) -> tuple[int, int]:
    header = reader.byte()
    size = header >> 4
    return header & 0x0F, reader.varint() if size == 15 else size


def _structs(content: int | bytes) -> Iterator[bytes]:
    """Yield the structs of a list."""
    if not content or not isinstance(content, bytes):
        return
    reader = _Reader(content)
    _, size = _list_header(reader)
    for _ in range(size):
        start = reader.at
        _skip(reader, _STRUCT)
        yield reader.since(start)


def _struct(fields: Iterable[_Field]) -> bytes:
    content, last = bytearray(), 0
    for number, kind, value in fields:
        delta = number - last
        content += bytes([delta << 4 | kind]) if 0 < delta < 16 else bytes([kind]) + _zigzag(number)
        content += value if isinstance(value, bytes) else _zigzag(value)
        last = number
    return bytes(content + b"\0")


def _list_of_structs(structs: list[bytes]) -> bytes:
    size = len(structs)
    header = bytes([size << 4 | _STRUCT]) if size < 15 else bytes([0xF0 | _STRUCT]) + _varint(size)
    return header + b"".join(structs)


def _zigzag(value: int) -> bytes:
    return _varint(value << 1 if value >= 0 else (-value << 1) - 1)


def _varint(value: int) -> bytes:
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(content + bytes([value]))
