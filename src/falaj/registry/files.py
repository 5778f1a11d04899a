"""The files of a version: inspect them on registration, verify their hashes on every read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Protocol

from falaj.errors import Damaged, FalajError, Internal, NotFound
from falaj.governance.blobs.contents import WrittenBlob
from falaj.governance.operations.call import Call
from falaj.ports.metadata import Database, Transaction
from falaj.ports.parsers import ByteSource, ParserPool
from falaj.records.governance.blobs import Blob
from falaj.records.models.facts import CodeReference
from falaj.records.names import ObjectId
from falaj.records.registry import FileFormat, ModelFile, ModelVersion, VersionCheck

MODEL_FILE, PICKLED_FILE = "model_file", "pickled_file"
"""The names of the parsers, see assembly/parsing.py: of all files, and of those that may be pickles."""
REPORT_BYTES = 64 << 20
"""Bytes between two progress reports of a check."""


class ModelBlobSource(Protocol):
    """Access to blobs. `facts` raises NotFound for a deleted blob.

    `read` opens its own transaction and yields at most `length` bytes from `offset`; `keep` makes a staged blob
    permanent. `write` stores the bytes of a new blob, which exists once `publish` was called in a transaction.
    """

    def facts(self, tx: Transaction, blob: ObjectId) -> Blob: ...

    def read(self, blob: Blob, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]: ...

    def keep(self, tx: Transaction, blob: Blob, *, now: datetime) -> None: ...

    def write(self, workspace: ObjectId, data: Iterator[bytes], *, zone: str) -> WrittenBlob: ...

    def publish(self, call: Call, written: WrittenBlob, workspace: ObjectId) -> Blob: ...


def inspect(
    path: str,
    blob: Blob,
    source: ModelBlobSource,
    parsers: ParserPool,
    *,
    owner: str,
    parser: str,
    defines: str = "",
) -> ModelFile:
    """Return the blob as the file `path` of a version. Raise InvalidInput if its format is not allowed.

    With `defines`, it must be Python source that defines that name.
    """
    facts = {"path": path, "defines": defines}
    parsed = parsers.parse(parser, [byte_source(source, blob)], facts, owner=owner)
    try:
        found = FileFormat(str(parsed.facts.get("format")))
    except ValueError:
        raise Internal("the parser of model files returned no format") from None
    return ModelFile(path=path, format=found, blob=blob.id, size_bytes=blob.size_bytes, sha256=blob.sha256)


def byte_source(source: ModelBlobSource, blob: Blob) -> ByteSource:
    """Return a blob as a source of a parser."""
    return ByteSource(blob.size_bytes, partial(read_range, source, blob))


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
    checks = [(file.path, _sizes(file, source, database)) for file in version.files]
    if version.code is not None and version.code.archive is not None:
        checks.append(("the archive of its code", _archive_sizes(version.code, source, database)))
    for path, sizes in checks:
        try:
            for size_bytes in sizes:
                checked += size_bytes
                if checked - reported >= REPORT_BYTES:
                    reported = checked
                    yield _state(version, checked, problems, finished=False)
        except FalajError as error:
            problems.append(error.message if path in error.message else f"{path}: {error.message}")
    yield _state(version, checked, problems, finished=True)


def _sizes(file: ModelFile, source: ModelBlobSource, database: Database) -> Iterator[int]:
    with database.read() as tx:
        blob = source.facts(tx, file.blob)
    require_same(file, blob)
    yield from (len(chunk) for chunk in verified(file, source.read(blob)))


def _archive_sizes(code: CodeReference, source: ModelBlobSource, database: Database) -> Iterator[int]:
    with database.read() as tx:
        blob = source.facts(tx, ObjectId(str(code.archive)))
    digest = hashlib.sha256()
    for chunk in source.read(blob):
        digest.update(chunk)
        yield len(chunk)
    if digest.hexdigest() != code.sha256:
        raise Damaged("its bytes are not those that were signed")


def _state(version: ModelVersion, checked: int, problems: list[str], *, finished: bool) -> VersionCheck:
    return VersionCheck(
        version=version.reference,
        signed_as=version.signed_as,
        key=version.key,
        finished=finished,
        ok=finished and not problems,
        checked_bytes=checked,
        size_bytes=version.size_bytes,
        problems=tuple(problems),
    )


def file_of(version: ModelVersion, path: str) -> ModelFile:
    """Return the file of a version under `path`."""
    for file in version.files:
        if file.path == path:
            return file
    raise NotFound(
        f"{version.reference} has no file {path!r}; it has {', '.join(f.path for f in version.files[:20])}"
    )
