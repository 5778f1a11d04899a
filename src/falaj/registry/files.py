"""The files of a version: inspect them on registration, verify their hashes on every read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Protocol

from falaj.errors import Damaged, FalajError, Internal
from falaj.ports.metadata import Database, Transaction
from falaj.ports.parsers import ByteSource, ParserPool
from falaj.records.governance.blobs import Blob
from falaj.records.names import ObjectId
from falaj.records.registry import FileFormat, ModelFile, ModelVersion, VersionCheck

MODEL_FILE = "model_file"
"""The name of the parser, see assembly/parsing.py."""
REPORT_BYTES = 64 << 20
"""Bytes between two progress reports of a check."""


class ModelBlobSource(Protocol):
    """Access to blobs. `facts` raises NotFound for a deleted blob.

    `read` opens its own transaction and yields at most `length` bytes from `offset`; `keep` makes a staged blob
    permanent.
    """

    def facts(self, tx: Transaction, blob: ObjectId) -> Blob: ...

    def read(self, blob: Blob, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]: ...

    def keep(self, tx: Transaction, blob: Blob, *, now: datetime) -> None: ...


def inspect(path: str, blob: Blob, source: ModelBlobSource, parsers: ParserPool, *, owner: str) -> ModelFile:
    """Return the blob as the file `path` of a version. Raise InvalidInput if its format is not allowed."""
    content = ByteSource(blob.size_bytes, partial(read_range, source, blob))
    parsed = parsers.parse(MODEL_FILE, [content], {"path": path}, owner=owner)
    try:
        found = FileFormat(str(parsed.facts.get("format")))
    except ValueError:
        raise Internal("the parser of model files returned no format") from None
    return ModelFile(path=path, format=found, blob=blob.id, size_bytes=blob.size_bytes, sha256=blob.sha256)


def require_same(file: ModelFile, blob: Blob) -> None:
    """Raise Damaged if the size or hash in the blob's row differs from the manifest."""
    if (blob.size_bytes, blob.sha256) != (file.size_bytes, file.sha256):
        raise Damaged(f"{file.path}: the record of its blob {blob.id} was changed after it was signed")


def verified(file: ModelFile, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the chunks; raise Damaged instead of the last one if the hash differs from the manifest."""
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


def read_range(source: ModelBlobSource, blob: Blob, offset: int, length: int) -> bytes:
    """Return `length` bytes of a blob from `offset`; fewer at its end."""
    return b"".join(source.read(blob, offset=offset, length=length))


def check_files(version: ModelVersion, source: ModelBlobSource, database: Database) -> Iterator[VersionCheck]:
    """Hash every file and yield the progress; the last item is the result."""
    checked, reported = 0, 0
    problems: list[str] = []
    for file in version.files:
        try:
            for size_bytes in _sizes(file, source, database):
                checked += size_bytes
                if checked - reported >= REPORT_BYTES:
                    reported = checked
                    yield _state(version, checked, problems, finished=False)
        except FalajError as error:
            problems.append(error.message if file.path in error.message else f"{file.path}: {error.message}")
    yield _state(version, checked, problems, finished=True)


def _sizes(file: ModelFile, source: ModelBlobSource, database: Database) -> Iterator[int]:
    with database.read() as tx:
        blob = source.facts(tx, file.blob)
    require_same(file, blob)
    yield from (len(chunk) for chunk in verified(file, source.read(blob)))


def _state(version: ModelVersion, checked: int, problems: list[str], *, finished: bool) -> VersionCheck:
    return VersionCheck(
        version=version.reference,
        finished=finished,
        ok=finished and not problems,
        checked_bytes=checked,
        size_bytes=version.size_bytes,
        problems=tuple(problems),
    )
