"""Where bytes lie: immutable sequences under a key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import NamedTuple, NewType, Protocol

BlobKey = NewType("BlobKey", str)


class StoredBlob(NamedTuple):
    key: BlobKey
    size_bytes: int
    modified_at: datetime


class BlobStore(Protocol):
    """Bytes under a key. A key exists whole or not at all, is never overwritten, and is seen once `write` returned.

    `write` raises AlreadyExists for a key that is there; `read` and `size` raise NotFound for one that is not;
    `delete` of a missing key does nothing. A store that cannot be reached raises Unavailable.
    """

    def write(self, key: BlobKey, chunks: Iterable[bytes]) -> int:
        """Store `chunks` under `key`; the number of bytes. If `chunks` raises, nothing is stored."""
        ...

    def read(self, key: BlobKey, *, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The bytes from `start`, at most `length` of them, in chunks."""
        ...

    def size(self, key: BlobKey) -> int: ...

    def delete(self, key: BlobKey) -> None: ...

    def delete_incomplete(self, *, before: datetime) -> int:
        """Remove what writes that were interrupted before `before` left; how many."""
        ...

    def list(self, prefix: str = "") -> Iterator[StoredBlob]: ...
