"""The bytes of a version: looked into when it is registered, hashed whenever they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Protocol

from falaj.errors import Damaged
from falaj.ports.metadata import Transaction
from falaj.records.governance.blobs import Blob
from falaj.records.names import ObjectId
from falaj.records.registry import ModelFile
from falaj.registry.formats import recognize
from falaj.registry.range_reader import RangeReader


class ModelBlobSource(Protocol):
    """Where the bytes of blobs come from. `facts` raises NotFound for a blob that was deleted.

    `read` opens a transaction of its own, and gives the bytes from `offset`, at most `length` of them; `keep` makes a
    staged blob stay.
    """

    def facts(self, tx: Transaction, blob: ObjectId) -> Blob: ...

    def read(self, blob: Blob, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]: ...

    def keep(self, tx: Transaction, blob: Blob, *, now: datetime) -> None: ...


def inspect(path: str, blob: Blob, source: ModelBlobSource) -> ModelFile:
    """The file that a blob is under `path`; InvalidInput if it is not one that a version may have."""
    reader = RangeReader(path, blob.size_bytes, partial(_range, source, blob))
    return ModelFile(
        path=path, format=recognize(reader), blob=blob.id, size_bytes=blob.size_bytes, sha256=blob.sha256
    )


def require_same(file: ModelFile, blob: Blob) -> None:
    """Damaged if the blob is no longer the one that was registered, as far as its row tells."""
    if (blob.size_bytes, blob.sha256) != (file.size_bytes, file.sha256):
        raise Damaged(f"{file.path}: the record of its blob {blob.id} was changed after it was signed")


def verified(file: ModelFile, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes; Damaged in place of the last chunk if they are not those of the manifest."""
    digest, size_bytes, held = hashlib.sha256(), 0, b""
    for chunk in chunks:
        digest.update(chunk)
        size_bytes += len(chunk)
        if held:
            yield held
        held = chunk
    if (size_bytes, digest.hexdigest()) != (file.size_bytes, file.sha256):
        raise Damaged(f"{file.path}: its bytes are not those that were signed")
    if held:
        yield held


def _range(source: ModelBlobSource, blob: Blob, offset: int, length: int) -> bytes:
    return b"".join(source.read(blob, offset=offset, length=length))
