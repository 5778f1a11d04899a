"""The port for the table store: tables of which every version stays readable."""

from __future__ import annotations

from typing import Any, NewType, Protocol, TypeAlias

TableKey = NewType("TableKey", str)
"""The path of a table in its store, such as `workspace/view/1`."""

ArrowRows: TypeAlias = Any
"""A pyarrow Table or RecordBatchReader; pyarrow ships no types."""

ArrowDataset: TypeAlias = Any
"""A pyarrow Dataset, which reads rows lazily."""


class TableStore(Protocol):
    """Versioned tables. A version is immutable, and is written completely or not at all.

    The caller records which version is published. Later versions in the store were never published, and the next
    `append` onto the published version discards them. `read` raises NotFound if the table or version does not exist.
    Every method raises Unavailable if the store cannot be reached.
    """

    def append(self, table: TableKey, rows: ArrowRows, *, onto: int) -> int:
        """Write the rows of version `onto` followed by `rows` as a new version, and return its number.

        Raise Conflict if another writer committed in between.
        """
        ...

    def overwrite(self, table: TableKey, rows: ArrowRows) -> int:
        """Write `rows` alone as a new version, and return its number. Create the table if it does not exist."""
        ...

    def read(self, table: TableKey, *, version: int) -> ArrowDataset:
        """Return the rows of one version."""
        ...

    def delete(self, table: TableKey) -> None:
        """Remove the table with all its versions. Without effect if it does not exist."""
        ...
