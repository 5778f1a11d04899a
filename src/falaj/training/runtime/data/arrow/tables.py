"""Open data frames, Arrow tables, and Parquet or Arrow files and folders, as columns of tensors.

The values are copied once, a piece at a time. If they would take more than half of the available memory, they are
copied into an anonymous temporary file (in TMPDIR), which is memory-mapped. The rows of a step are scattered over it,
and each costs a disk read unless its page is in the page cache.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from falaj.training.runtime.data.arrays import is_frame, is_of
from falaj.training.runtime.data.arrow.columns import (
    ColumnSelection,
    column_tensors,
    is_fixed_size_list,
    is_integer,
    select_columns,
)
from falaj.training.runtime.data.sources import TensorSource
from falaj.training.runtime.errors import InvalidTraining, TrainingFault

MEMORY_SHARE = 0.5
ROWS_PER_PIECE = 65_536
PARQUET, ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")


def open_table(
    data: Any, *, inputs: Sequence[str] | None, target: str | Sequence[str] | None, where: str
) -> TensorSource:
    """Return a table, dataset or path as (inputs, target); without a target as inputs alone."""
    found = open_reader(data, where)
    chosen = select_columns(found.schema, inputs=inputs, target=target, where=where)
    rows = found.count()
    if not rows:
        raise InvalidTraining(
            "the data cannot be used", faults=[TrainingFault(where, "no rows", "at least one")]
        )
    sizes = (
        (rows * chosen.input_width, chosen.input_type),
        (rows * chosen.target_width, chosen.target_type),
    )
    need = sum(count * dtype.itemsize for count, dtype in sizes)
    is_large = need > MEMORY_SHARE * available_memory_bytes()
    inputs_, target_ = (allocate(count, dtype, mapped=is_large, where=where) for count, dtype in sizes)
    inputs_, target_ = inputs_.view(rows, chosen.input_width), target_.view(rows, chosen.target_width)
    copy_rows(found.pieces(chosen.names), chosen, inputs_, target_, where)
    if not chosen.target:
        return TensorSource(inputs_, where=where, mapped=is_large)
    classes = chosen.target_type is torch.int64
    return TensorSource((inputs_, target_[:, 0] if classes else target_), where=where, mapped=is_large)


def copy_rows(
    pieces: Iterator[Any], chosen: ColumnSelection, inputs: Tensor, target: Tensor, where: str
) -> None:
    """Copy the values, then raise InvalidTraining if there were nulls."""
    done, nulls = 0, dict[str, int]()
    for piece in pieces:
        if not (rows := len(piece)):
            continue
        for names, into in ((chosen.inputs, inputs), (chosen.target, target)):
            if names:
                torch.cat(
                    [v.to(into.dtype) for v in column_tensors(piece, names, nulls)],
                    1,
                    out=into[done : done + rows],
                )
        done += rows
    require_no_nulls(nulls, done, where)


def require_no_nulls(nulls: Mapping[str, int], rows: int, where: str) -> None:
    """Raise InvalidTraining if a column has nulls."""
    fix = "fill them (fillna, fill_null), or leave those rows or columns out"
    faults = [
        TrainingFault(f"{where}[{name!r}]", f"{count} nulls in {rows} rows", "a number in every row", fix)
        for name, count in nulls.items()
        if count
    ]
    if faults:
        raise InvalidTraining("the table has nulls", faults=faults)


def frame_tensor(frame: Any, *, where: str) -> Tensor:
    """Return a data frame as a matrix of float32."""
    columns: Tensor = open_table(frame, inputs=None, target=None, where=where).columns
    return columns


def series_tensor(series: Any, *, where: str) -> Tensor:
    """Return one column of a data frame: integers as a vector of int64, anything else as a matrix of float32."""
    name = "values" if series.name is None else str(series.name)
    table = frame_table(series.to_frame(name), where)
    kind = table.schema.field(0).type
    if not is_integer(kind) or is_fixed_size_list(kind):
        return frame_tensor(table, where=where)
    nulls: dict[str, int] = {}
    parts = [column_tensors(batch, table.schema.names, nulls)[0] for batch in table.to_batches()]
    require_no_nulls(nulls, table.num_rows, where)
    return torch.cat(parts).to(torch.int64)[:, 0] if parts else torch.empty(0, dtype=torch.int64)


def frame_table(frame: Any, where: str) -> Any:
    """Return a data frame as a pyarrow table, without the index of pandas."""
    import pyarrow as pa

    try:
        if is_of(frame, "pandas"):
            return pa.Table.from_pandas(frame, preserve_index=False)
        return pa.RecordBatchReader.from_stream(frame).read_all()
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        fault = TrainingFault(where, reason, "a frame whose columns have different names and one type each")
        raise InvalidTraining("the data frame cannot be read", faults=[fault]) from error


class ArrowTable:
    """A table in memory, or memory-mapped."""

    def __init__(self, table: Any) -> None:
        self._table, self.schema = table, table.schema

    def count(self) -> int:
        return int(self._table.num_rows)

    def pieces(self, names: Sequence[str]) -> Iterator[Any]:
        yield from self._table.select(list(dict.fromkeys(names))).to_batches(max_chunksize=ROWS_PER_PIECE)


class ParquetFiles:
    """Parquet files with equal columns, in the order of their names."""

    def __init__(self, paths: Sequence[Path], where: str) -> None:
        import pyarrow.parquet as parquet

        self._files = [parquet.ParquetFile(path, memory_map=True, pre_buffer=False) for path in paths]
        self.schema = self._files[0].schema_arrow
        for path, file in zip(paths, self._files, strict=True):
            if not file.schema_arrow.equals(self.schema):
                allowed = f"the columns of {paths[0].name}: {', '.join(map(str, self.schema.names))}"
                fault = TrainingFault(where, f"{path.name}: {', '.join(file.schema_arrow.names)}", allowed)
                raise InvalidTraining("the files have different columns", faults=[fault])

    def count(self) -> int:
        return sum(file.metadata.num_rows for file in self._files)

    def pieces(self, names: Sequence[str]) -> Iterator[Any]:
        for file in self._files:
            yield from file.iter_batches(batch_size=ROWS_PER_PIECE, columns=list(dict.fromkeys(names)))


def open_reader(data: Any, where: str) -> ArrowTable | ParquetFiles:
    import pyarrow as pa
    import pyarrow.dataset as datasets

    if isinstance(data, str | Path):
        return open_path(Path(data), where)
    if is_frame(data):
        return ArrowTable(frame_table(data, where))
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    elif isinstance(data, pa.RecordBatchReader):
        data = data.read_all()
    elif isinstance(data, datasets.Dataset):
        data = data.to_table()
    return ArrowTable(data)


def open_path(path: Path, where: str) -> ArrowTable | ParquetFiles:
    import pyarrow as pa

    def ending(suffixes: tuple[str, ...]) -> list[Path]:
        there = sorted(path.rglob("*")) if path.is_dir() else [path]
        visible = (each for each in there if not any(p[0] in "._" for p in each.relative_to(path).parts))
        return [each for each in visible if each.suffix in suffixes and each.is_file()]

    try:
        if files := ending(PARQUET):
            return ParquetFiles(files, where)
        if files := ending(ARROW):
            maps = [pa.ipc.open_file(pa.memory_map(str(file))).read_all() for file in files]
            return ArrowTable(pa.concat_tables(maps))
    except (OSError, pa.ArrowInvalid) as error:
        fault = TrainingFault(where, f"{path}: {error}", "files of Parquet or Arrow")
        raise InvalidTraining("the data cannot be read", faults=[fault]) from error
    given = f"{path}, which {'holds none' if path.exists() else 'is not there'}"
    allowed = f"a file or folder of {', '.join(PARQUET + ARROW)}"
    raise InvalidTraining("there is no table", faults=[TrainingFault(where, given, allowed)])


def allocate(count: int, dtype: torch.dtype, *, mapped: bool, where: str) -> Tensor:
    """Return an uninitialized tensor in memory, or in an anonymous temporary file."""
    if not mapped or not count:
        return torch.empty(count, dtype=dtype)
    size = count * dtype.itemsize
    try:
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype)
    except OSError as error:
        given = f"{size / 1e9:.1f} GB in {tempfile.gettempdir()} ({error.strerror})"
        fault = TrainingFault(where, given, "enough space for the values", "TMPDIR=/where/there/is/space")
        raise InvalidTraining(
            "the data fits neither in memory nor in the temporary folder", faults=[fault]
        ) from error


def available_memory_bytes() -> int:
    """Return the memory that can be allocated now, by the machine and by the limit of the cgroup."""
    free = [1 << 62]
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # "max": no limit
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(free))
