"""The rows of a batch prediction: Parquet files in a fixed order, read with bounded memory from any row on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from falaj.errors import Conflict, Fault, InvalidInput, IsolationRefused, NotFound, shorten
from falaj.ports.table_folders import TableFolders

MOST_FAULTS = 10
READ_BYTES = 1 << 20
"""A column of a row group is read in pieces of this size, so that row groups of any size fit into memory."""
UNREADABLE = (pa.ArrowException, OSError, ValueError, UnicodeDecodeError)
TEXT_BYTES = 64
"""The least that is reckoned for a value of varying size: a dictionary makes it small in a file."""
ASKED_FILES = 16
FIX_DRIFT = "write it with the same types as the other files, then run the same command again: it goes on"


@dataclass(frozen=True)
class InputFile:
    """A Parquet file: its name in the input, its rows, and a fingerprint that changes with its content.

    `group_digests` are those of the bytes of its row groups, if it is a copy that each attempt at a job makes anew.
    """

    path: Path
    name: str
    rows: int
    group_rows: tuple[int, ...]
    fingerprint: str
    schema: Any
    constants: Mapping[str, Any] = field(default_factory=dict)
    group_digests: tuple[str, ...] = ()


class RowSource(NamedTuple):
    """Rows that were written together, and a mark that changes with them: a file, or a row group of a copy."""

    name: str
    mark: str
    rows: int


@dataclass(frozen=True)
class InputTable:
    """The input of a run; `version` is that of a Delta table, whose files may lack columns: they are null there."""

    files: tuple[InputFile, ...]
    schema: Any
    version: int | None = None

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.files)

    def sources(self) -> list[RowSource]:
        """Return where the rows come from, in their order; what has no row is left out."""
        found: list[RowSource] = []
        for file in self.files:
            if file.group_digests:
                groups = zip(file.group_digests, file.group_rows, strict=True)
                found += [
                    RowSource(f"{file.name}, row group {number}", digest, rows)
                    for number, (digest, rows) in enumerate(groups)
                ]
            else:
                found.append(RowSource(file.name, file.fingerprint, file.rows))
        return [each for each in found if each.rows]

    def place(self, row: int) -> str:
        """Return the file and the row group that hold `row`, in words."""
        for file in self.files:
            if row < file.rows:
                number = 0
                while row >= file.group_rows[number]:
                    row -= file.group_rows[number]
                    number += 1
                return f"{file.name}, row group {number}"
            row -= file.rows
        return "the end of the input"


def open_input(path: Path, folders: TableFolders, *, version: int | None = None) -> InputTable:
    """Open a Parquet file, a folder of them, or a Delta table, by default its newest version. No row is read yet."""
    if not path.exists():
        raise NotFound(f"there is no input {path}")
    if path.is_dir() and folders.is_table(path):
        listed = folders.open(path, version=version)
        files = [_opened(path / each.name, each.name, each.constants) for each in listed.files]
        return InputTable(tuple(files), listed.schema, listed.version)
    if path.is_file():
        files = [_opened(path, path.name, {})]
    else:
        files = [_opened(each, each.relative_to(path).as_posix(), {}) for each in _parquet_files(path)]
    if not files:
        raise InvalidInput.at(
            str(path), given="a folder without *.parquet", allowed="Parquet files, or a Delta table"
        )
    return InputTable(tuple(files), files[0].schema)


def open_copy(path: Path) -> InputTable:
    """Open a Parquet file that was copied for this process alone: its row groups are known by their bytes."""
    file = _opened(path, path.name, {})
    try:
        digests = _group_digests(path)
    except UNREADABLE as error:
        given = shorten(_first_line(error), limit=300)
        raise InvalidInput.at(path.name, given=given, allowed="rows that can be read") from None
    return InputTable((replace(file, group_digests=digests),), file.schema)


def require_one_schema(table: InputTable, columns: Sequence[str]) -> None:
    """Raise InvalidInput with each file in which one of `columns` is missing, doubled or of another type."""
    faults = [fault for file in table.files for fault in _drift(table, file, columns)]
    if faults:
        raise InvalidInput(
            f"the files of the input differ in {len(faults)} columns from the first one",
            faults=faults[:MOST_FAULTS],
        )


def row_bytes(table: InputTable, columns: Sequence[str]) -> float:
    """Return about how many bytes a row of `columns` takes: by their types, or by what the first files say."""
    fixed = {name: _width_bytes(table.schema.field(name).type) for name in columns}
    varying = {name for name, size in fixed.items() if size is None}
    largest = max((_stored_bytes(file, varying) for file in table.files[:ASKED_FILES]), default=0.0)
    return sum(size or 0.0 for size in fixed.values()) + largest


def _width_bytes(kind: Any) -> float | None:
    try:
        return float(kind.bit_width) / 8
    except ValueError:
        return None


def _stored_bytes(file: InputFile, columns: set[str]) -> float:
    """Return the bytes of a row in these columns in the first row group of a file, before compression."""
    if not columns or not file.rows:
        return 0.0
    group = pq.read_metadata(file.path).row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    size = sum(
        each.total_uncompressed_size for each in chunks if each.path_in_schema.split(".")[0] in columns
    )
    return float(max(TEXT_BYTES * len(columns), size / max(1, group.num_rows)))


def read_parts(table: InputTable, columns: Sequence[str], *, start: int, part_rows: int) -> Iterator[Any]:
    """Yield tables of `part_rows` rows from row `start` on; the last one may be shorter.

    A part begins at the same row whether or not a run was resumed, so that the model sees the same batches.
    """
    waiting: list[Any] = []
    size = 0
    for batch in _batches(table, columns, start=start, batch_rows=part_rows):
        while batch.num_rows:
            taken = batch.slice(0, part_rows - size)
            batch = batch.slice(taken.num_rows)
            waiting.append(taken)
            size += taken.num_rows
            if size == part_rows:
                yield pa.Table.from_batches(waiting).combine_chunks()
                waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting).combine_chunks()


def _batches(table: InputTable, columns: Sequence[str], *, start: int, batch_rows: int) -> Iterator[Any]:
    for file in table.files:
        if start >= file.rows:
            start -= file.rows
            continue
        yield from _file_batches(table, file, columns, start=start, batch_rows=batch_rows)
        start = 0


def _file_batches(
    table: InputTable, file: InputFile, columns: Sequence[str], *, start: int, batch_rows: int
) -> Iterator[Any]:
    """Yield the rows of one file from `start` on; Conflict if it is not the file that was planned."""
    first, skipped = 0, start
    while skipped >= file.group_rows[first]:
        skipped -= file.group_rows[first]
        first += 1
    there = [name for name in columns if name in file.schema.names]
    done = 0
    try:
        _require_unchanged(file)
        # with `pre_buffer`, a reader keeps the bytes of every row group that it has read
        with pq.ParquetFile(
            file.path, buffer_size=READ_BYTES, pre_buffer=False, arrow_extensions_enabled=False
        ) as source:
            groups = list(range(first, len(file.group_rows)))
            for batch in source.iter_batches(batch_rows, row_groups=groups, columns=there, use_threads=True):
                dropped = min(skipped, batch.num_rows)
                skipped -= dropped
                done += batch.num_rows - dropped
                yield _completed(table, file, columns, batch.slice(dropped))
        _require_unchanged(file)
    except PermissionError:
        raise _closed(file.name) from None
    except UNREADABLE as error:
        place = table.place(_rows_before(table, file) + min(start + done, file.rows - 1))
        raise InvalidInput.at(
            place, given=shorten(_first_line(error), limit=300), allowed="rows that can be read"
        ) from None
    if start + done != file.rows:
        raise InvalidInput.at(
            file.name, given=f"{start + done} rows", allowed=f"the {file.rows} rows that its footer names"
        )


def _require_unchanged(file: InputFile) -> None:
    if _fingerprint(file.path, pq.read_metadata(file.path)) != file.fingerprint:
        raise Conflict(
            f"{file.name} has changed while it was read; run the same command again, which goes on if the rows that "
            "are done have not changed"
        )


def _completed(table: InputTable, file: InputFile, columns: Sequence[str], batch: Any) -> Any:
    """Return the batch with `columns` in their order: partition values, and nulls where a Delta file lacks one."""
    arrays = []
    for name in columns:
        kind = plain_type(table.schema.field(name).type)
        if name in file.constants:
            arrays.append(pa.repeat(pa.scalar(file.constants[name]).cast(kind), batch.num_rows))
        elif name not in batch.schema.names:
            arrays.append(pa.nulls(batch.num_rows, kind))
        else:
            found = batch.column(name)
            arrays.append(found if found.type == kind else found.cast(kind))
    fields = [pa.field(name, array.type) for name, array in zip(columns, arrays, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def plain_type(kind: Any) -> Any:
    """Return the type without a dictionary, whose values are decoded when they are read."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _drift(table: InputTable, file: InputFile, columns: Sequence[str]) -> Iterator[Fault]:
    for name in columns:
        count = file.schema.names.count(name)
        if name in file.constants or (count == 0 and table.version is not None):
            continue
        wanted = plain_type(table.schema.field(name).type)
        if count != 1:
            given = "missing" if count == 0 else f"{count} columns of that name"
            yield Fault(where=f"{file.name}, column {name}", given=given, allowed=str(wanted), fix=FIX_DRIFT)
            continue
        found = plain_type(file.schema.field(name).type)
        if found != wanted and not (table.version is not None and _widens(found, wanted)):
            allowed = f"{wanted}, as in {table.files[0].name}"
            yield Fault(where=f"{file.name}, column {name}", given=str(found), allowed=allowed, fix=FIX_DRIFT)


def _widens(found: Any, wanted: Any) -> bool:
    """Return whether Delta stores `wanted` as `found`: large and view types, and units of time."""
    return (str(found).removeprefix("large_"), pa.types.is_timestamp(found)) == (
        str(wanted).removeprefix("large_"),
        pa.types.is_timestamp(wanted),
    ) or (pa.types.is_timestamp(found) and pa.types.is_timestamp(wanted))


def _parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files below `folder` in the order of their paths; hidden ones and `_` files are others'."""
    return sorted(
        path
        for path in folder.rglob("*.parquet")
        if path.is_file() and not any(part[0] in "._" for part in path.relative_to(folder).parts)
    )


def _opened(path: Path, name: str, constants: Mapping[str, Any]) -> InputFile:
    try:
        metadata = pq.read_metadata(path)
        groups = tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
        fingerprint = _fingerprint(path, metadata)
        schema = pq.read_schema(path)
    except PermissionError:
        raise _closed(name) from None
    except UNREADABLE as error:
        given = shorten(_first_line(error), limit=300)
        raise InvalidInput.at(
            name, given=given, allowed="a whole Parquet file", fix="write the file again"
        ) from None
    if sum(groups) != metadata.num_rows or any(rows < 0 for rows in groups):
        raise InvalidInput.at(
            name,
            given=f"{metadata.num_rows} rows, in row groups {sum(groups)}",
            allowed="a whole Parquet file",
        )
    return InputFile(path, name, metadata.num_rows, groups, fingerprint, schema, constants)


def _closed(name: str) -> IsolationRefused:
    """Return the error of a file that this process may not read; one in another sandbox perhaps may."""
    return IsolationRefused(f"{name} may not be read by the process of the prediction")


def _fingerprint(path: Path, metadata: Any) -> str:
    """Return size, time of the last change and a digest of the footer, which has the sizes of all pages."""
    with open(path, "rb") as opened:
        found = os.fstat(opened.fileno())
        size = min(metadata.serialized_size + 8, found.st_size)
        footer = os.pread(opened.fileno(), size, found.st_size - size)
    return f"{found.st_size}-{found.st_mtime_ns}-{hashlib.sha256(footer).hexdigest()[:16]}"


def _group_digests(path: Path) -> tuple[str, ...]:
    """Return a digest of the bytes of each row group."""
    metadata = pq.read_metadata(path)
    found = []
    with open(path, "rb") as opened:
        for number in range(metadata.num_row_groups):
            group, digest = metadata.row_group(number), hashlib.sha256()
            for column in range(group.num_columns):
                chunk = group.column(column)
                opened.seek(
                    min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset)
                )
                left = chunk.total_compressed_size
                while left > 0 and (piece := opened.read(min(left, READ_BYTES))):
                    digest.update(piece)
                    left -= len(piece)
            found.append(digest.hexdigest())
    return tuple(found)


def _rows_before(table: InputTable, file: InputFile) -> int:
    return sum(each.rows for each in table.files[: table.files.index(file)])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
