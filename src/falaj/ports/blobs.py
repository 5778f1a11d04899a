"""The port for blobs: immutable bytes under a key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import NamedTuple, NewType, Protocol

BlobKey = NewType("BlobKey", str)


class StoredBlob(NamedTuple):
    """One entry of a listing."""

    key: BlobKey
    size_bytes: int
    modified_at: datetime


class UploadAddress(NamedTuple):
    """Where somebody without credentials may put the bytes of one blob by an HTTP PUT; they are `staged` there."""

    staged: str
    url: str


class BlobStore(Protocol):
    """Bytes under a key.

    A write is atomic: a key holds all bytes or does not exist, it is never overwritten, and every reader sees it once
    `write` has returned. `write` raises AlreadyExists if the key exists. `read` and `size` raise NotFound if it does
    not. `delete` of a missing key does nothing. Every method raises Unavailable if the store cannot be reached.
    """

    def write(self, key: BlobKey, chunks: Iterable[bytes]) -> int:
        """Store `chunks` under `key` and return the number of bytes. If `chunks` raises, nothing is stored."""
        ...

    def read(self, key: BlobKey, *, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Return the bytes from `start` on in chunks, at most `length` bytes in all."""
        ...

    def size(self, key: BlobKey) -> int:
        """Return the number of bytes."""
        ...

    def delete(self, key: BlobKey) -> None: ...

    def delete_incomplete(self, *, before: datetime) -> int:
        """Delete the data of writes that were interrupted before `before`, and return how many there were."""
        ...

    def list(self, prefix: str = "") -> Iterator[StoredBlob]:
        """Return the blobs whose keys begin with `prefix`."""
        ...

    def open_upload(self, *, lasts: timedelta) -> UploadAddress | None:
        """Return an address at which one blob can be uploaded for so long; none if the store takes none."""
        ...

    def adopt(self, staged: str, key: BlobKey) -> None:
        """Store what was uploaded as `staged` under `key`, where its uploader cannot change it any more.

        NotFound if nothing was uploaded, AlreadyExists if the key exists, TooLarge if the store cannot move so much.
        """
        ...

    def discard(self, staged: str) -> None:
        """Remove what was uploaded as `staged`, if anything was."""
        ...
