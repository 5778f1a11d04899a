"""Where rows lie: tables of which every version stays readable."""

from __future__ import annotations

from typing import Any, NewType, Protocol, TypeAlias

TableKey = NewType("TableKey", str)
"""Where a table lies in its store, such as `workspace/view/1`."""

ArrowRows: TypeAlias = Any
"""A pyarrow Table or RecordBatchReader; pyarrow ships no types."""

ArrowDataset: TypeAlias = Any
"""A pyarrow Dataset: rows that are read when they are asked for."""


class TableStore(Protocol):
    """Tables whose versions are pinned elsewhere. A version never changes, and is whole or not there.

    Which version counts is for the caller to write down: what lies in the store beyond it was never published, and the
    next `append` onto that version leaves it out. `read` of a table or version that is not there raises NotFound, a
    store that cannot be reached Unavailable.
    """

    def append(self, table: TableKey, rows: ArrowRows, *, onto: int) -> int:
        """The version that holds what version `onto` holds, and `rows`. Conflict if another writer came between."""
        ...

    def overwrite(self, table: TableKey, rows: ArrowRows) -> int:
        """The version that holds `rows` only; makes the table if there is none."""
        ...

    def read(self, table: TableKey, *, version: int) -> ArrowDataset: ...

    def delete(self, table: TableKey) -> None:
        """Remove the table with all its versions; nothing happens if there is none."""
        ...
