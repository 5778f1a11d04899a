"""The BlobStore over obstore, for local directories and buckets, which differ in how a blob is published."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import GenericError
from obstore.store import LocalStore, ObjectStore, S3Store

from falaj import errors
from falaj.drivers.objectstore.bucket_publisher import COPY_LIMIT_BYTES, BucketPublisher
from falaj.drivers.objectstore.file_publisher import FilePublisher
from falaj.drivers.objectstore.publisher import STAGING, Publisher, staging_name, translate_errors
from falaj.ports.blobs import BlobKey, StoredBlob, UploadAddress

if TYPE_CHECKING:
    from obstore.store import S3Config

MIB = 1 << 20
KEY_PATTERN = re.compile(
    r"(?=.{1,900}\Z)[A-Za-z0-9_][\w.=@+-]{0,254}(/[A-Za-z0-9_][\w.=@+-]{0,254})*", re.ASCII
)
KEY_RULE = "up to 900 characters: parts of A-Z a-z 0-9 _ . = @ + - joined by '/', none beginning with a dot"


def local_blobs(directory: Path) -> ObjectStoreBlobs:
    """Return a store in `directory`, which is created if necessary."""
    publisher = FilePublisher(directory)
    return ObjectStoreBlobs(LocalStore(directory), publisher, range_bytes=4 * MIB, ranges=1)


def s3_blobs(
    bucket: str,
    *,
    region: str,
    endpoint: str | None = None,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    prefix: str | None = None,
) -> ObjectStoreBlobs:
    """Return a store in an S3 bucket. Without an access key, the credentials of the environment or machine are used."""
    config: S3Config = {"region": region, "copy_if_not_exists": "multipart"}
    if endpoint is not None:
        config["endpoint"] = endpoint
    if access_key_id is not None and secret_access_key is not None:
        config["access_key_id"] = access_key_id
        config["secret_access_key"] = secret_access_key
    store = S3Store(
        bucket,
        prefix=prefix,
        config=config,
        client_options={
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
            "timeout": timedelta(minutes=5),  # of one request: copying 5 GiB inside the bucket is one
        },
        retry_config={"max_retries": 3, "retry_timeout": timedelta(minutes=1)},
    )
    return ObjectStoreBlobs(store, BucketPublisher(store), range_bytes=8 * MIB, ranges=4)


class ObjectStoreBlobs:
    """A BlobStore. Reads fetch `ranges` ranges of `range_bytes` concurrently."""

    def __init__(self, store: ObjectStore, publisher: Publisher, *, range_bytes: int, ranges: int) -> None:
        self._store = store
        self._publisher = publisher
        self._range_bytes = range_bytes
        self._ranges = ranges

    def write(self, key: BlobKey, chunks: Iterable[bytes]) -> int:
        return self._publisher.publish(checked(key), chunks)

    def read(self, key: BlobKey, *, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        if start < 0 or (length is not None and length < 0):
            raise errors.InvalidInput.at(
                "range", given=(start, length), allowed="start and length of at least 0"
            )
        first = self._range_bytes if length is None else min(self._range_bytes, length)
        opening, size = self._open(checked(key), start, first)
        end = size if length is None else min(size, start + length)
        return self._chunks(key, opening, start + len(opening), end)

    def size(self, key: BlobKey) -> int:
        with translate_errors(key):
            return obstore.head(self._store, checked(key))["size"]

    def delete(self, key: BlobKey) -> None:
        try:
            with translate_errors(key):
                obstore.delete(self._store, checked(key))
        except errors.NotFound:
            pass

    def list(self, prefix: str = "") -> Iterator[StoredBlob]:
        directory = prefix.rpartition("/")[0]  # obstore lists whole directories only
        for blob in self._listed(checked(directory) if directory else ""):
            if blob.key.startswith(prefix) and not blob.key.startswith(f"{STAGING}/"):
                yield blob

    def delete_incomplete(self, *, before: datetime) -> int:
        leftovers = [blob.key for blob in self._listed(STAGING) if blob.modified_at < before]
        for key in leftovers:
            with translate_errors(key):
                obstore.delete(self._store, key)
        return len(leftovers)

    def open_upload(self, *, lasts: timedelta) -> UploadAddress | None:
        if not isinstance(self._store, S3Store):
            return None
        staged = staging_name()
        with translate_errors(staged):
            return UploadAddress(staged, obstore.sign(self._store, "PUT", staged, lasts))

    def adopt(self, staged: str, key: BlobKey) -> None:
        with translate_errors(key):
            size = obstore.head(self._store, staged)["size"]
            if size > COPY_LIMIT_BYTES:
                raise errors.TooLarge(
                    f"an upload of {size} bytes; the store moves at most {COPY_LIMIT_BYTES}"
                )
            obstore.copy(self._store, staged, checked(key), overwrite=False)
        self.discard(staged)

    def discard(self, staged: str) -> None:
        with suppress(errors.FalajError), translate_errors(staged):
            obstore.delete(self._store, staged)

    def _open(self, key: BlobKey, start: int, length: int) -> tuple[bytes, int]:
        """Return the first `length` bytes from `start`, and the size of the blob, in one request."""
        if not length:
            return b"", self.size(key)
        with translate_errors(key):
            try:
                found = obstore.get(self._store, key, options={"range": (start, start + length)})
                return bytes(found.bytes()), found.meta["size"]
            except GenericError:  # perhaps because the blob ends before `start`
                if start < (size := self.size(key)):
                    raise
                return b"", size

    def _chunks(self, key: BlobKey, opening: bytes, start: int, end: int) -> Iterator[bytes]:
        if opening:
            yield opening
        while start < end:
            until = min(end, start + self._ranges * self._range_bytes)
            starts = range(start, until, self._range_bytes)
            ends = [min(until, offset + self._range_bytes) for offset in starts]
            with translate_errors(key):
                found = obstore.get_ranges(self._store, key, starts=starts, ends=ends, coalesce=0)
            yield from map(bytes, found)
            start = until

    def _listed(self, directory: str) -> Iterator[StoredBlob]:
        with translate_errors(directory):
            for batch in obstore.list(self._store, directory or None):
                for found in batch:
                    yield StoredBlob(BlobKey(found["path"]), found["size"], found["last_modified"])


def checked(key: str) -> BlobKey:
    """Return `key`. Raise InvalidInput if it could name something outside the store."""
    if not KEY_PATTERN.fullmatch(key):
        raise errors.InvalidInput.at(
            "blob key", given=key, allowed=KEY_RULE, fix="name it by an id or a digest"
        )
    return BlobKey(key)
