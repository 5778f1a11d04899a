"""The first rows of tables among artifacts. The parser runs in the parser process (ports/parsers.py)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from falaj.errors import InvalidInput
from falaj.ports.parsers import ByteSource, Parsed
from falaj.records.tracking import PREVIEW_COLUMNS, ArtifactTable

CELL_CHARACTERS = 200
ALLOWED = "a table as Parquet or Arrow"


def parse_first_rows(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The parser of previews: the first rows of a Parquet or Arrow file as text; options `path` and `rows`."""
    import pyarrow as pa

    (source,) = sources
    try:
        facts = _first_rows(_RangeFile(source), rows=options["rows"])
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        given = str(error).partition("\n")[0][:400]
        raise InvalidInput.at(options["path"], given=given, allowed=ALLOWED) from None
    return Parsed(facts=facts)


def read_preview(found: Parsed, *, path: str, rows: int) -> ArtifactTable:
    """Return what a parser process answered, checked as if a stranger had sent it."""
    try:
        table = ArtifactTable.model_validate({"path": path, **found.facts})
    except ValidationError:
        raise InvalidInput.at(path, given="rows that do not fit together", allowed=ALLOWED) from None
    if len(table.rows) > rows or any(len(row) != len(table.columns) for row in table.rows):
        raise InvalidInput.at(path, given="rows that do not fit together", allowed=ALLOWED)
    return table


def _first_rows(file: _RangeFile, *, rows: int) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.ipc as ipc
    import pyarrow.parquet as parquet

    head = file.read(6)
    file.seek(0)
    if head[:4] == b"PAR1":
        opened = parquet.ParquetFile(file)
        names, total = opened.schema_arrow.names, opened.metadata.num_rows
        found = next(opened.iter_batches(batch_size=rows, columns=names[:PREVIEW_COLUMNS]), None)
    elif head == b"ARROW1":
        stored = ipc.open_file(pa.PythonFile(file, mode="r"))
        names, total = stored.schema.names, None
        found = stored.get_batch(0) if stored.num_record_batches else None
    else:
        raise ValueError("it begins like neither")
    shown = [] if found is None else _texts(found.slice(0, rows))
    return {
        "columns": [name[:CELL_CHARACTERS] for name in names[:PREVIEW_COLUMNS]],
        "rows": shown,
        "total_rows": total,
    }


def _texts(batch: Any) -> list[list[str | None]]:
    batch.validate(full=True)
    columns = [batch.column(at).to_pylist() for at in range(min(batch.num_columns, PREVIEW_COLUMNS))]
    return [[_text(value) for value in row] for row in zip(*columns, strict=True)]


def _text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= CELL_CHARACTERS else text[:CELL_CHARACTERS] + "…"


class _RangeFile(io.RawIOBase):
    """A file over bytes that are read by ranges, so that the end of a large one can be read without the middle."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size_bytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._source.size_bytes - self._at)
        found = self._source.read_range(self._at, left if size < 0 else min(size, left)) if left else b""
        self._at += len(found)
        return found
