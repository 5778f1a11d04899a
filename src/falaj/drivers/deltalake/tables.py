"""Tables as Delta Lake, on local files or on object storage."""

from __future__ import annotations

import shutil
from pathlib import Path

from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from falaj.errors import Conflict, NotFound, Unavailable
from falaj.ports.tables import ArrowDataset, ArrowRows, TableKey


class DeltaTables:
    """Each table is a folder below `root`: Parquet files and a log of versions."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def append(self, table: TableKey, rows: ArrowRows, *, onto: int) -> int:
        found = self._open(table)
        try:
            if found.version() != onto:  # what came after was never published
                found.restore(onto)
            before = found.version()
            write_deltalake(found, rows, mode="append")
        except CommitFailedError as error:
            raise Conflict(f"table {table}: another writer came between; try again") from error
        except DeltaError as error:
            raise Unavailable(f"table {table} cannot be written: {error}") from error
        if found.version() != before + 1:
            raise Conflict(f"table {table}: another writer came between; try again")
        return int(found.version())

    def overwrite(self, table: TableKey, rows: ArrowRows) -> int:
        path = self._path(table)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            write_deltalake(str(path), rows, mode="overwrite", schema_mode="overwrite")
        except CommitFailedError as error:
            raise Conflict(f"table {table}: another writer came between; try again") from error
        except DeltaError as error:
            raise Unavailable(f"table {table} cannot be written: {error}") from error
        return int(DeltaTable(str(path)).version())

    def read(self, table: TableKey, *, version: int) -> ArrowDataset:
        return self._open(table, version=version).to_pyarrow_dataset()

    def delete(self, table: TableKey) -> None:
        shutil.rmtree(self._path(table), ignore_errors=True)

    def _open(self, table: TableKey, *, version: int | None = None) -> DeltaTable:
        shown = table if version is None else f"{table}@{version}"
        try:
            return DeltaTable(str(self._path(table)), version=version)
        except (TableNotFoundError, DeltaError) as error:
            raise NotFound(f"there is no table {shown}") from error

    def _path(self, table: TableKey) -> Path:
        return self._root / table
