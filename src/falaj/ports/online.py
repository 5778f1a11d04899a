"""Where the newest features lie: one value per entity, read in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NewType, Protocol, TypeAlias

ViewName = NewType("ViewName", str)
EntityKey = NewType("EntityKey", bytes)

ArrowBatch: TypeAlias = Any
"""A pyarrow RecordBatch."""

COLUMNS = ("key", "event_time", "value")
"""What rows to write consist of: binary, microseconds since 1970 as int64, binary."""


class OnlineStore(Protocol):
    """Newest row per key. A read after a returned write sees it; an older event time never overwrites a newer one.

    Of two rows with the same event time the later write counts. Reads never wait for writes. The store is a projection:
    it may lose its last writes in a power cut, and can be filled again.
    """

    def write(self, view: ViewName, rows: ArrowBatch) -> int:
        """Write `rows`, with the columns `key`, `event_time` and `value`; how many of them took effect."""
        ...

    def read(self, view: ViewName, keys: Sequence[EntityKey]) -> list[bytes | None]:
        """The value of every key, in their order; none where there is none."""
        ...

    def close(self) -> None: ...
