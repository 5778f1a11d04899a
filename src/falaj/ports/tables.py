"""The port for the table store: tables of which every version stays readable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from hashlib import sha256
from typing import Any, NamedTuple, NewType, Protocol, TypeAlias

TableKey = NewType("TableKey", str)
"""The path of a table in its store, such as `workspace/view/1`."""

ArrowRows: TypeAlias = Any
"""A pyarrow Table or RecordBatchReader; pyarrow ships no types."""

ArrowDataset: TypeAlias = Any
"""A pyarrow Dataset, which reads rows lazily."""


class TableFile(NamedTuple):
    """A file with rows: its name within its table, its size, and the SHA-256 of its bytes in hex."""

    path: str
    size_bytes: int
    sha256: str


class TableVersion(NamedTuple):
    """A version of a table: its number, and all its files in the order in which they are read."""

    number: int
    files: tuple[TableFile, ...]

    @property
    def digest(self) -> str:
        """The SHA-256 in hex over the sorted lines `sha256 size path`, one for each file, each with its newline."""
        lines = sorted(f"{each.sha256} {each.size_bytes} {each.path}\n" for each in self.files)
        return sha256("".join(lines).encode()).hexdigest()


class StoredTableFile(NamedTuple):
    """One entry of a listing: a file with rows, whether or not a version has it."""

    table: TableKey
    path: str
    modified_at: datetime


class TableStore(Protocol):
    """Versioned tables. A version is immutable, and is written completely or not at all.

    The caller records which versions are published, with their files and hashes: what `append` and `overwrite` return
    is on disk, and survives a power failure. Later versions in the store were never published, and the next `append`
    onto the published version discards them. A method that reads raises NotFound if the table or version does not
    exist, and Damaged if its files are not what was written. Every method raises Unavailable if the store cannot be
    reached.
    """

    def turn(self, queue: TableKey, *, wait_s: float, subject: str = "") -> AbstractContextManager[None]:
        """Wait until no other caller, in whatever process, has the turn of `queue`, and hold it for the block.

        Turns are given in the order of arrival, and end with the process that holds them. Raise Unavailable if this
        one has not come after `wait_s` seconds; the error names `subject`.
        """
        ...

    def append(self, table: TableKey, rows: ArrowRows, *, onto: TableVersion) -> TableVersion:
        """Write the rows of version `onto` and `rows` as a new version, and return it.

        Where small files pile up they are merged: the new version has others instead, and `onto` keeps its own. Raise
        Conflict if another writer committed in between.
        """
        ...

    def overwrite(self, table: TableKey, rows: ArrowRows) -> TableVersion:
        """Write `rows` alone as a new version, and return it. Create the table if it does not exist."""
        ...

    def read(self, table: TableKey, *, version: TableVersion) -> ArrowDataset:
        """Return the rows of one version. Its files are checked first; most of those checked before are not hashed."""
        ...

    def check(self, table: TableKey, *, version: TableVersion) -> None:
        """Hash every file of a version. Raise Damaged with a fault for each that is not what was written."""
        ...

    def has_files(self, table: TableKey, *, version: TableVersion) -> bool:
        """Tell whether the files of a version exist. Their bytes are not looked at."""
        ...

    def list_files(self) -> Iterator[StoredTableFile]:
        """Return all files with rows, also those of unpublished versions and of writes that were interrupted."""
        ...

    def delete_file(self, table: TableKey, path: str) -> None:
        """Remove a file that no published version has. Without effect if it does not exist."""
        ...

    def delete(self, table: TableKey) -> None:
        """Remove the table with all its versions. Without effect if it does not exist."""
        ...
