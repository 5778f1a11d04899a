"""Walk FlatBuffers, whose readers trust every offset: LiteRT models, and the core of CatBoost's."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from falaj.registry.file_formats.range_reader import RangeReader

MOST_ITEMS = 1_000_000
LITERT_MARK = b"TFL3"
LITERT_VERSION = 3
OPERATOR_CODES, SUBGRAPHS, BUFFERS = 1, 2, 4
TENSORS, INPUTS, OUTPUTS, OPERATORS = 0, 1, 2, 3
CATBOOST_MARK, CATBOOST_FORMAT = b"CBM1", b"FlabuffersModel_v1"
CATBOOST_HEAD_BYTES = 8


class UnsoundFlatbuffer(ValueError):
    """An offset or a number that leads out of the file, or to something else than it says."""


class FlatTable:
    """A table of a flatbuffer that lies in `start` to `end` of a file; its fields are numbered from 0."""

    def __init__(self, reader: RangeReader, start: int, end: int, position: int) -> None:
        self._reader, self._start, self._end = reader, start, end
        self._position = position
        layout = position - self._number(position, "<i")
        size, table_bytes = (self._number(layout + place, "<H") for place in (0, 2))
        if size < 4 or size % 2 or table_bytes < 4 or position + table_bytes > end:
            raise UnsoundFlatbuffer("a table whose layout is not one")
        self._fields = [offset[0] for offset in struct.iter_unpack("<H", self._bytes(layout, size)[4:])]
        if any(offset and not 4 <= offset < table_bytes for offset in self._fields):
            raise UnsoundFlatbuffer("a table with a field outside of it")

    def number(self, field: int, kind: str, *, default: int = 0) -> int:
        """Return a number; `kind` is its format as `struct` writes it."""
        place = self._place(field)
        return default if place is None else self._number(place, kind)

    def text(self, field: int) -> bytes:
        start, size_bytes = self.vector(field, 1)
        return self._bytes(start, size_bytes)

    def table(self, field: int) -> FlatTable | None:
        place = self._place(field)
        return None if place is None else self._table_at(place)

    def tables(self, field: int) -> Iterator[FlatTable]:
        """Yield the tables of a vector."""
        start, count = self.vector(field, 4)
        if count > MOST_ITEMS:
            raise UnsoundFlatbuffer(f"{count} tables in a list")
        for number in range(count):
            yield self._table_at(start + 4 * number)

    def numbers(self, field: int) -> list[int]:
        """Return a vector of int32."""
        start, count = self.vector(field, 4)
        if count > MOST_ITEMS:
            raise UnsoundFlatbuffer(f"{count} numbers in a list")
        return [each[0] for each in struct.iter_unpack("<i", self._bytes(start, 4 * count))]

    def vector(self, field: int, item_bytes: int) -> tuple[int, int]:
        """Return where a vector begins, and how many items it has; none of them is read."""
        place = self._place(field)
        if place is None:
            return self._start, 0
        vector = place + self._number(place, "<I")
        count = self._number(vector, "<I")
        if vector + 4 + count * item_bytes > self._end:
            raise UnsoundFlatbuffer("a list that is longer than the file")
        return vector + 4, count

    def _table_at(self, place: int) -> FlatTable:
        return FlatTable(self._reader, self._start, self._end, place + self._number(place, "<I"))

    def _place(self, field: int) -> int | None:
        offset = self._fields[field] if field < len(self._fields) else 0
        return self._position + offset if offset else None

    def _number(self, place: int, kind: str) -> int:
        return int(struct.unpack(kind, self._bytes(place, struct.calcsize(kind)))[0])

    def _bytes(self, place: int, length: int) -> bytes:
        if place < self._start or place + length > self._end:
            raise UnsoundFlatbuffer("an offset that leads out of the file")
        return self._reader.at(place, length)


def root_table(reader: RangeReader, start: int, end: int) -> FlatTable:
    if end - start < 8:
        raise UnsoundFlatbuffer("too few bytes")
    return FlatTable(reader, start, end, start + int.from_bytes(reader.at(start, 4), "little"))


def litert_fault(reader: RangeReader) -> str | None:
    """Return what is wrong with a LiteRT model; none if every table that an interpreter follows is sound."""
    try:
        model = root_table(reader, 0, reader.size_bytes)
        if model.number(0, "<I") != LITERT_VERSION:
            return "of another version than 3"
        buffers = sum(1 for each in model.tables(BUFFERS) if _require_data(each, reader.size_bytes))
        operators = sum(1 for _ in model.tables(OPERATOR_CODES))
        graphs = sum(
            1 for each in model.tables(SUBGRAPHS) if _require_graph(each, buffers=buffers, codes=operators)
        )
        return None if graphs else "without a graph"
    except UnsoundFlatbuffer as error:
        return f"damaged: {error}"


def _require_data(buffer: FlatTable, size_bytes: int) -> bool:
    buffer.vector(0, 1)
    if buffer.number(1, "<Q") + buffer.number(2, "<Q") > size_bytes:  # data after the tables, of large models
        raise UnsoundFlatbuffer("weights that are not in the file")
    return True


def _require_graph(graph: FlatTable, *, buffers: int, codes: int) -> bool:
    tensors = 0
    for tensor in graph.tables(TENSORS):
        tensor.numbers(0)
        if tensor.number(2, "<I") >= buffers:
            raise UnsoundFlatbuffer("a tensor without a buffer")
        tensors += 1
    for operator in graph.tables(OPERATORS):
        if operator.number(0, "<I") >= codes:
            raise UnsoundFlatbuffer("an operator without a code")
        _require_tensors([*operator.numbers(1), *operator.numbers(2)], tensors)
    _require_tensors([*graph.numbers(INPUTS), *graph.numbers(OUTPUTS)], tensors)
    return True


def _require_tensors(indices: list[int], count: int) -> None:
    if any(not -1 <= index < count for index in indices):  # -1: an input that may be left out
        raise UnsoundFlatbuffer("an operator on a tensor that is not there")


def catboost_fault(reader: RangeReader) -> str | None:
    """Return what is wrong with a CatBoost model; none if its core is sound, and all of the file."""
    size_bytes = int.from_bytes(reader.at(4, 4), "little")
    end = CATBOOST_HEAD_BYTES + size_bytes
    if end > reader.size_bytes:
        return "truncated"
    try:
        core = root_table(reader, CATBOOST_HEAD_BYTES, end)
        if core.text(0) != CATBOOST_FORMAT:
            return "of an unknown version"
        if core.table(1) is None:
            return "without trees"
        for pair in core.tables(2):
            pair.text(0), pair.text(1)
        _, parts = core.vector(3, 4)
    except UnsoundFlatbuffer as error:
        return f"damaged: {error}"
    return None if parts or end == reader.size_bytes else "followed by something else"
