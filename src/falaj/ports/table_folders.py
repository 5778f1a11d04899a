"""The port for Delta tables in folders of users, outside of the platform's table store: their log alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

ArrowSchema: TypeAlias = Any


class LoggedFile(NamedTuple):
    """A file of a table: its name below the table's folder, and the values of its partition columns."""

    name: str
    constants: Mapping[str, Any]


class LoggedTable(NamedTuple):
    """One version of a table: its schema, and its files in the order in which they are read."""

    version: int
    schema: ArrowSchema
    files: Sequence[LoggedFile]


class TableFolders(Protocol):
    """Reads or creates the log of a table in a folder; its rows are Parquet files that others read and write.

    Bytes of strangers are parsed: call it in a process without keys. Where a folder holds no table, or one with
    features that change what its files mean (deletion vectors, column mapping), InvalidInput is raised.
    """

    def is_table(self, folder: Path) -> bool: ...

    def open(self, folder: Path, *, version: int | None = None) -> LoggedTable:
        """Return a version of a table; the newest by default."""
        ...

    def require_storable(self, schema: ArrowSchema) -> None:
        """Raise InvalidInput if a table cannot hold the columns of `schema` as they are."""
        ...

    def create(self, folder: Path, file: str) -> int:
        """Make a table of the Parquet file `file`, which is in `folder`, durably; return the number of its version."""
        ...
