"""Parse uploaded files of rows: Parquet, Arrow and CSV. This code runs in the parser process (ports/parsers.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.ipc as ipc
import pyarrow.parquet as parquet

from falaj.errors import InvalidInput
from falaj.governance import arrow_ipc
from falaj.ports.parsers import ByteSource, Parsed
from falaj.ports.queries import ArrowTable

BATCH_ROWS = 1 << 16
HEAD_BYTES = 1 << 16
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
"""How text in another encoding begins."""
NULLS = pa.array(csv.ConvertOptions().null_values)
DAY = r"^(\d{4}-\d\d-\d\d)$"
ALLOWED = "rows as Parquet, CSV or Arrow"


def parse_rows(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The parser of spines: the rows of a file, in types that every reader knows and a table can store."""
    from falaj.features.validation import conversion

    rows = conversion.storable(read_rows(sources, options), where=_where(options))
    return Parsed(content=arrow_ipc.write_table(rows))


def parse_columns(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The parser that looks at the columns of a file: names and types, and the number of rows."""
    from falaj.features import arrow_tables

    rows = read_rows(sources, options)
    if same := [name for name, count in Counter(rows.column_names).items() if count > 1]:
        raise InvalidInput.at(_where(options), given=", ".join(same), allowed="each column once")
    columns = [(name, arrow_tables.guess_type(rows[name])) for name in rows.column_names]
    return Parsed(facts={"columns": columns, "rows": rows.num_rows})


def read_rows(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> ArrowTable:
    """Return the rows of the one source, fully validated.

    The options are its `name`, `texts` (columns of a CSV that are read as text) and `limit_bytes` (of decoded rows).
    Columns in `typed` are no texts: one wrong value makes all of a CSV's column text, and the others are mended then.
    """
    (source,) = sources
    where, limit_bytes = _where(options), options["limit_bytes"]
    data = pa.py_buffer(source.read_range(0, source.size_bytes))
    try:
        table = _parsed(data, options, where)
        return _plain(table, where, limit_bytes)
    except MemoryError:
        raise
    except arrow_ipc.UNSOUND as error:
        raise InvalidInput.at(where, given=arrow_ipc.first_line(error), allowed=ALLOWED) from None


def _where(options: Mapping[str, Any]) -> str:
    return f"blob {options['name']}"


def _parsed(data: Any, options: Mapping[str, Any], where: str) -> ArrowTable:
    head, limit_bytes = data[:6].to_pybytes(), options["limit_bytes"]
    if head[:4] == b"PAR1":
        return _parquet(data, limit_bytes)
    if head == b"ARROW1":
        file = ipc.open_file(data)
        batches = (file.get_batch(number) for number in range(file.num_record_batches))
        return arrow_ipc.validated(batches, file.schema, limit_bytes=limit_bytes)
    if head[:4] == b"\xff\xff\xff\xff":
        stream = ipc.open_stream(data)
        return arrow_ipc.validated(stream, stream.schema, limit_bytes=limit_bytes)
    table = _mended(_read_csv(data, options["texts"], where), options.get("typed", ()))
    return arrow_ipc.validated(table.to_batches(), table.schema, limit_bytes=limit_bytes)


def _read_csv(data: Any, texts: Iterable[str], where: str) -> ArrowTable:
    """Read CSV in UTF-8 with commas; another encoding or separator is named, which pyarrow does not do."""
    head = data[:HEAD_BYTES].to_pybytes()
    encoding = next((name for mark, name in MARKS.items() if head.startswith(mark)), None)
    if encoding is not None:
        raise _other_encoding(where, encoding)
    convert = csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string()))
    try:
        table = csv.read_csv(pa.BufferReader(data), convert_options=convert)
        names = table.column_names
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error):
            raise _other_encoding(where, "LATIN1") from None
        _require_commas(where, head)
        raise
    if len(names) == 1:
        _require_commas(where, head)
    if any(pa.types.is_binary(kind) for kind in table.schema.types):
        raise _other_encoding(where, "LATIN1")
    return table


def _mended(table: ArrowTable, typed: Iterable[str]) -> ArrowTable:
    """Return `table` where texts in columns of another type are as pyarrow reads them in a column without wrong values.

    There, spaces around a value do not count, some spellings are null, and a day is its midnight.
    """
    for name in typed:
        if table.column_names.count(name) == 1 and pa.types.is_string(table[name].type):
            values = pc.utf8_trim_whitespace(table[name])
            values = pc.replace_substring_regex(values, DAY, r"\1T00:00:00")
            values = pc.if_else(pc.is_in(values, NULLS), None, values)
            table = table.set_column(table.column_names.index(name), name, values)
    return table


def _require_commas(where: str, head: bytes) -> None:
    """Raise InvalidInput if the first line has another separator, and no comma."""
    line = head.partition(b"\n")[0].decode(errors="replace")
    found = next((each for each in SEPARATORS if each in line), None) if "," not in line else None
    if found is not None:
        raise InvalidInput.at(
            where,
            given=f"columns separated by {SEPARATORS[found]}: {line.strip()}",
            allowed="columns separated by commas",
            fix="save it with commas between columns and points in numbers, or as Parquet",
        )


def _other_encoding(where: str, encoding: str) -> InvalidInput:
    return InvalidInput.at(
        where,
        given=f"text that is not UTF-8, probably {encoding}",
        allowed="text in UTF-8",
        fix=f"iconv --from-code {encoding} --to-code UTF-8 FILE > utf8.csv",
    )


def _parquet(data: Any, limit_bytes: int) -> ArrowTable:
    """Read batch by batch: a page of a few bytes can hold any number of equal values."""
    file = parquet.ParquetFile(pa.BufferReader(data), arrow_extensions_enabled=False)
    _require_rows_fit(file, limit_bytes)
    batches = file.iter_batches(batch_size=BATCH_ROWS, use_threads=False)
    return arrow_ipc.validated(batches, file.schema_arrow, limit_bytes=limit_bytes)


def _require_rows_fit(file: Any, limit_bytes: int) -> None:
    """Refuse a file that says itself that it holds too much. What it says may be false: reading is bounded, too."""
    widths = [_width_bytes(field.type) for field in file.schema_arrow]
    if file.metadata.num_rows * sum(widths) > limit_bytes:
        raise arrow_ipc.too_large(limit_bytes)


def _width_bytes(kind: Any) -> float:
    """Least size of a value."""
    try:
        return kind.bit_width / 8 if pa.types.is_primitive(kind) else 0.0
    except ValueError:
        return 0.0


def _plain(table: ArrowTable, where: str, limit_bytes: int) -> ArrowTable:
    found = arrow_ipc.decoded(table).replace_schema_metadata(None)
    arrow_ipc.require_plain(found.schema, where=where)
    if arrow_ipc.size_bytes(found) > limit_bytes:
        raise arrow_ipc.too_large(limit_bytes)
    return found
