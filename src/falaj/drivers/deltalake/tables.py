"""Tables as Delta Lake, on local files or on object storage."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from falaj.errors import Conflict, NotFound, Unavailable
from falaj.ports.tables import ArrowDataset, ArrowRows, TableKey

MARK = "falaj.write"
"""The commit metadata key that identifies a write: the newest version may already be another writer's."""


class DeltaTables:
    """A TableStore. Each table is a folder below `root` with Parquet files and a log of versions."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def append(self, table: TableKey, rows: ArrowRows, *, onto: int) -> int:
        found = self._open(table)
        try:
            if found.version() != onto:  # later versions were never published
                found.restore(onto)
            before = found.version()
            write_deltalake(found, rows, mode="append")
        except CommitFailedError as error:
            raise Conflict(f"table {table}: another writer committed in between; try again") from error
        except DeltaError as error:
            raise Unavailable(f"table {table} cannot be written: {error}") from error
        if found.version() != before + 1:
            raise Conflict(f"table {table}: another writer committed in between; try again")
        return int(found.version())

    def overwrite(self, table: TableKey, rows: ArrowRows) -> int:
        path = self._path(table)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            found = DeltaTable(str(path)) if DeltaTable.is_deltatable(str(path)) else None
            before = -1 if found is None else found.version()
            mark = CommitProperties(custom_metadata={MARK: (token := uuid.uuid4().hex)})
            write_deltalake(
                found or str(path), rows, mode="overwrite", schema_mode="overwrite", commit_properties=mark
            )
            version = _version_of(DeltaTable(str(path)), token)
        except CommitFailedError as error:
            raise Conflict(f"table {table}: another writer committed in between; try again") from error
        except DeltaError as error:
            raise Unavailable(f"table {table} cannot be written: {error}") from error
        if version != before + 1:  # it may hold rows of another writer
            raise Conflict(f"table {table}: another writer committed in between; try again")
        return version

    def read(self, table: TableKey, *, version: int) -> ArrowDataset:
        return self._open(table, version=version).to_pyarrow_dataset()

    def delete(self, table: TableKey) -> None:
        shutil.rmtree(self._path(table), ignore_errors=True)

    def _open(self, table: TableKey, *, version: int | None = None) -> DeltaTable:
        shown = table if version is None else f"{table}@{version}"
        try:
            return DeltaTable(str(self._path(table)), version=version)
        except (TableNotFoundError, DeltaError) as error:
            raise NotFound(f"table {shown} does not exist") from error

    def _path(self, table: TableKey) -> Path:
        return self._root / table


def _version_of(table: DeltaTable, token: str) -> int:
    return next(int(commit["version"]) for commit in table.history() if commit.get(MARK) == token)
