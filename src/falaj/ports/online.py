"""The port for the online store: the newest feature row of each entity, read in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NewType, Protocol, TypeAlias

ViewName = NewType("ViewName", str)
EntityKey = NewType("EntityKey", bytes)

ArrowBatch: TypeAlias = Any
"""A pyarrow RecordBatch."""

COLUMNS = ("key", "event_time", "value")
"""The columns of a batch to write: binary; int64, microseconds since 1970; binary, at most `MAX_VALUE_BYTES`.

A value may hold rows that become known later beside the newest one; `event_time` is then the newest of theirs.
"""
MAX_VALUE_BYTES = 1_000_000


class OnlineStore(Protocol):
    """The newest value per key. A read after a returned write sees it; an older event time overwrites no newer one.

    Of two rows with the same event time the later write wins. Reads never wait for writes. A returned write survives a
    power failure. Every method raises Damaged if the store is not what was written; it is a projection and can be
    rebuilt. It raises Unavailable if the store cannot be reached.
    """

    def write(self, view: ViewName, rows: ArrowBatch) -> int:
        """Write `rows`, which have the columns `COLUMNS`, and return how many of them were stored.

        Without rows, the view is known from then on to have none.
        """
        ...

    def read(self, view: ViewName, keys: Sequence[EntityKey]) -> list[bytes | None]:
        """Return the value of each key in the order of `keys`; none for a key that is missing.

        Raise Damaged if `view` was never written: its values were lost.
        """
        ...

    def check(self) -> None:
        """Read everything. Raise Damaged if it is not what was written."""
        ...

    def close(self) -> None: ...


class OnlinePlace(Protocol):
    """Where the online values of a zone lie: how a store is opened there, and what can be done while none is open."""

    @property
    def address(self) -> str:
        """What tells this place from others, without secrets."""
        ...

    @property
    def file(self) -> Path | None:
        """The file or folder that only processes of this machine share; none if a server holds the values."""
        ...

    def open(self) -> OnlineStore: ...

    def is_sound(self) -> bool:
        """Tell whether all that is stored is what was written. What was never made is sound.

        A damaged store must not end the process that asks.
        """
        ...

    def set_aside(self, suffix: str) -> str | None:
        """Let the next store begin empty; return where the values of before are kept under `suffix`.

        None if there were no values, or if they were not kept.
        """
        ...
