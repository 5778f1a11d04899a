"""Arrow streams of others: read and fully validated before anything looks at a value.

pyarrow takes lengths, offsets and indices in such a stream as they are; a false one reads memory that is not the
stream's. Other modules import this one inside functions, because pyarrow is slow to load.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc

from falaj.errors import InvalidInput, TooLarge, shorten
from falaj.ports.parsers import ByteSource, Parsed
from falaj.ports.queries import ArrowTable

UNSOUND = (pa.ArrowException, OSError, ValueError, KeyError)
"""What pyarrow raises for data that is not sound; a KeyError for a type that it does not show to Python."""
RECORD_BATCH, COMPRESSION_FIELD = 3, 3
"""In Message.fbs: the number of the header's type, and that of a field in it."""
VALUE_BYTES = 8
SMALL_BATCH_ROWS = 1024
ALLOWED_TYPES = "numbers, booleans, text, bytes, dates, times, and lists, structs and maps of these"


def read_table(content: Any, *, where: str, limit_bytes: int) -> ArrowTable:
    """Read a stream or file in memory. Raise InvalidInput unless every buffer in it is sound.

    Raise TooLarge for rows of more than `limit_bytes`.
    """
    buffer = pa.py_buffer(content)
    try:
        if buffer[:6].to_pybytes() == b"ARROW1":
            file = ipc.open_file(buffer)
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
            return validated(batches, file.schema, limit_bytes=limit_bytes)
        stream = ipc.open_stream(buffer)
        return validated(stream, stream.schema, limit_bytes=limit_bytes)
    except UNSOUND as error:
        raise InvalidInput.at(where, given=first_line(error), allowed="sound Arrow data") from None


def read_result(content: Any, *, where: str, limit_bytes: int) -> ArrowTable:
    """Read rows that a parser process returned: a stream, not compressed, of plain types, and all of it sound.

    A process that was taken over could send anything, such as a few bytes that decompress to very many. Raise TooLarge
    for rows of more than `limit_bytes`.
    """
    buffer = pa.py_buffer(content)
    try:
        for message in ipc.MessageReader.open_stream(buffer):
            if message.type not in ("schema", "record batch") or _is_compressed(
                message.metadata.to_pybytes()
            ):
                raise InvalidInput.at(where, given="not what the parser of rows returns")
    except (*UNSOUND, struct.error, IndexError) as error:
        raise InvalidInput.at(where, given=first_line(error), allowed="sound Arrow data") from None
    table = read_table(buffer, where=where, limit_bytes=limit_bytes)
    require_plain(table.schema, where=where)
    return table


def _is_compressed(metadata: bytes) -> bool:
    """Whether a message is a record batch with compressed buffers, by its flatbuffers table (Message.fbs)."""
    (root,) = struct.unpack_from("<I", metadata, 0)
    kind, header = _field(metadata, root, 1), _field(metadata, root, 2)
    if kind is None or header is None or metadata[kind] != RECORD_BATCH:
        return False
    (start,) = struct.unpack_from("<I", metadata, header)
    return _field(metadata, header + start, COMPRESSION_FIELD) is not None


def _field(metadata: bytes, table: int, number: int) -> int | None:
    """The place of a field of a flatbuffers table; none if it is not there."""
    (back,) = struct.unpack_from("<i", metadata, table)
    if not 0 <= table - back < len(metadata):
        raise struct.error("a table outside of its message")
    (size,) = struct.unpack_from("<H", metadata, table - back)
    if size < 6 + 2 * number:
        return None
    (offset,) = struct.unpack_from("<H", metadata, table - back + 4 + 2 * number)
    return table + offset if offset else None


def parse_arrow(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The parser of Arrow that the platform's own processes wrote: the same rows, sound and not compressed.

    The options are `where`, for errors, and `limit_bytes` of the rows.
    """
    (source,) = sources
    content, limit_bytes = source.read_range(0, source.size_bytes), options["limit_bytes"]
    table = decoded(read_table(content, where=options["where"], limit_bytes=limit_bytes))
    if size_bytes(table) > limit_bytes:
        raise too_large(limit_bytes)
    return Parsed(content=write_table(table))


def validated(batches: Iterable[Any], schema: Any, *, limit_bytes: int) -> ArrowTable:
    """Return the batches as a table, each fully validated before the next is read: ArrowInvalid unless it is sound.

    This checks buffer sizes, offsets, UTF-8, indices of dictionaries, run ends, views and null counts, at any depth.
    Raise TooLarge when the rows take more than `limit_bytes`; their size is asked for after they are validated, because
    pyarrow follows offsets to tell it.
    """
    found, taken = [], 0
    for batch in batches:
        batch.validate(full=True)
        taken += size_bytes(batch)
        if taken > limit_bytes:
            raise too_large(limit_bytes)
        found.append(batch)
    table = pa.Table.from_batches(found, schema)
    table.validate(full=True)  # the schema of a file need not be that of its batches
    return table


def too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"the rows take more than {limit_bytes} bytes in memory; upload them in parts")


def size_bytes(rows: Any) -> int:
    """Return the memory of a validated batch or table, as if none of its values took less than a number.

    Nulls without a type, and values of width 0, take no bytes: a stream of 300 bytes has billions of rows of them.
    """
    arrays = [chunk for column in rows.columns for chunk in getattr(column, "chunks", [column])]
    return int(rows.nbytes + VALUE_BYTES * sum(map(_count_weightless, arrays)))


def _count_weightless(array: Any) -> int:
    """Count the values at any depth that take no memory."""
    kind, types = array.type, pa.types
    if types.is_struct(kind) and kind.num_fields:
        return sum(_count_weightless(array.field(number)) for number in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _count_weightless(array.values)
    if types.is_map(kind):
        return _count_weightless(array.keys) + _count_weightless(array.items)
    is_weightless = types.is_null(kind) or types.is_struct(kind)
    is_weightless |= types.is_fixed_size_binary(kind) and not kind.byte_width
    return len(array) if is_weightless else 0


def decoded(table: ArrowTable) -> ArrowTable:
    """Replace dictionaries, run ends, views and extensions of columns by the values that they stand for."""
    columns = [_decoded_column(column) for column in table.columns]
    return pa.table(columns, names=table.column_names).replace_schema_metadata(table.schema.metadata)


def _decoded_column(column: Any) -> Any:
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
    elif pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    elif pa.types.is_run_end_encoded(kind):
        column = pc.run_end_decode(column)
    elif pa.types.is_string_view(kind):
        column = column.cast(pa.string())
    elif pa.types.is_binary_view(kind):
        column = column.cast(pa.binary())
    return column if column.type == kind else _decoded_column(column)


def write_table(table: ArrowTable) -> Any:
    """Return the table as a stream, in a buffer. Many small batches, which cost their reader more, become one."""
    batches = max((column.num_chunks for column in table.columns), default=0)
    if batches > 1 and table.num_rows < SMALL_BATCH_ROWS * batches:
        table = table.combine_chunks()
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def require_plain(schema: Any, *, where: str) -> None:
    """Raise InvalidInput for columns of types that hide others: unions, run ends, views, dictionaries, extensions."""
    for number, name in enumerate(schema.names):
        try:
            kind = schema.field(number).type
            plain, given = is_plain(kind), str(kind)
        except KeyError:
            plain, given = False, "a type that pyarrow does not show to Python"
        if not plain:
            raise InvalidInput.at(f"{where}.{shorten(name)}", given=given, allowed=ALLOWED_TYPES)


def is_plain(kind: Any) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return is_plain(kind.value_type)
    if types.is_map(kind):
        return is_plain(kind.key_type) and is_plain(kind.item_type)
    if types.is_struct(kind):
        return all(is_plain(kind.field(number).type) for number in range(kind.num_fields))
    return any(
        is_kind(kind)
        for is_kind in (
            types.is_null,
            types.is_boolean,
            types.is_integer,
            types.is_floating,
            types.is_decimal,
            types.is_string,
            types.is_large_string,
            types.is_binary,
            types.is_large_binary,
            types.is_fixed_size_binary,
            types.is_temporal,
        )
    )


def first_line(error: Exception) -> str:
    return shorten(str(error).partition("\n")[0], limit=400)
