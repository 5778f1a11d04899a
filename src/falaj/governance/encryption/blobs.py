"""Blobs that are encrypted before they reach a store, and authenticated when they come back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import datetime, timedelta
from itertools import islice
from typing import Protocol

from falaj.governance.encryption import frames
from falaj.governance.encryption.frames import DataKey, SealingKey
from falaj.ports.blobs import BlobKey, BlobStore, StoredBlob, UploadAddress


class DataKeys(Protocol):
    """The data keys of a workspace. A version that was destroyed raises KeyUnavailable."""

    def current(self, workspace: str) -> DataKey: ...

    def version(self, workspace: str, version: int) -> bytes: ...


class EncryptedBlobs:
    """Blobs of a workspace: whoever holds the store alone reads nothing and changes nothing unnoticed."""

    def __init__(self, store: BlobStore, keys: DataKeys) -> None:
        self._store = store
        self._keys = keys

    def write(self, workspace: str, key: BlobKey, chunks: Iterable[bytes]) -> None:
        """Store `chunks` under `key`; if `chunks` raises, nothing is stored. A chunk must not change once given."""
        data_key = self._keys.current(workspace)
        sealed = frames.encrypt(chunks, key=data_key, workspace=workspace, blob=key)
        self._store.write(key, read_ahead(sealed))

    def read(
        self, workspace: str, key: BlobKey, *, start: int = 0, length: int | None = None
    ) -> Iterator[bytes]:
        """The plain bytes from `start`, at most `length` of them. Use no part of them if the iterator raises."""

        def read_range(offset: int, size: int) -> Iterator[bytes]:
            stored = self._store.read(key, start=offset, length=size)
            return read_ahead(stored)

        return frames.decrypt(
            read_range,
            stored_size=self._store.size(key),
            keys=lambda version: self._keys.version(workspace, version),
            workspace=workspace,
            blob=key,
            start=start,
            length=length,
        )

    def open_upload(
        self, workspace: str, key: BlobKey, *, lasts: timedelta
    ) -> tuple[UploadAddress, SealingKey] | None:
        """Return where somebody may upload the blob for so long, and its key; none if the store takes no uploads."""
        address = self._store.open_upload(lasts=lasts)
        if address is None:
            return None
        return address, frames.sealing_key(key=self._keys.current(workspace), workspace=workspace, blob=key)

    def adopt(self, key: BlobKey, staged: str) -> None:
        """Store what was uploaded; only reading it proves that it is what it should be."""
        self._store.adopt(staged, key)

    def discard(self, staged: str) -> None:
        self._store.discard(staged)

    def size(self, key: BlobKey) -> int:
        """The plain size, as the stored size tells it."""
        return frames.plain_size(self._store.size(key), blob=key)

    def delete(self, key: BlobKey) -> None:
        self._store.delete(key)

    def delete_incomplete(self, *, before: datetime) -> int:
        """Remove what writes that were interrupted before `before` left; how many."""
        return self._store.delete_incomplete(before=before)

    def list(self, prefix: str = "") -> Iterator[StoredBlob]:
        """List the stored blobs with their sizes at rest."""
        return self._store.list(prefix)


AHEAD_AFTER = 3
"""A header and two frames are not worth a thread."""


def read_ahead(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same chunks; once there are more than a few, the next is made in a thread while the last is being used."""
    yield from islice(chunks, AHEAD_AFTER)
    context = copy_context()
    with ThreadPoolExecutor(max_workers=1) as beside:
        upcoming = beside.submit(context.run, _next, chunks)
        while (chunk := upcoming.result()) is not None:
            upcoming = beside.submit(context.run, _next, chunks)
            yield chunk


def _next(chunks: Iterator[bytes]) -> bytes | None:
    return next(chunks, None)
