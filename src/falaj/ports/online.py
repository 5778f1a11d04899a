"""The port for the online store: the newest feature row of each entity, read in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NewType, Protocol, TypeAlias

ViewName = NewType("ViewName", str)
EntityKey = NewType("EntityKey", bytes)

ArrowBatch: TypeAlias = Any
"""A pyarrow RecordBatch."""

COLUMNS = ("key", "event_time", "value")
"""The columns of a batch to write: binary; int64, microseconds since 1970; binary."""


class OnlineStore(Protocol):
    """The newest row per key. A read after a returned write sees it; an older event time never overwrites a newer one.

    Of two rows with the same event time the later write wins. Reads never wait for writes. The store is a projection:
    it may lose its last writes in a power failure, and can be rebuilt.
    """

    def write(self, view: ViewName, rows: ArrowBatch) -> int:
        """Write `rows`, which have the columns `COLUMNS`, and return how many of them were stored."""
        ...

    def read(self, view: ViewName, keys: Sequence[EntityKey]) -> list[bytes | None]:
        """Return the value of each key in the order of `keys`; none for a key that is missing."""
        ...

    def close(self) -> None: ...
