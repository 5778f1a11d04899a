"""Publishes a blob in a bucket: by one conditional request, or staged and then copied if the key is still free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from itertools import chain

import obstore
from obstore.store import ObjectStore

from falaj import errors
from falaj.drivers.objectstore.publisher import already_exists, staging_name, translate_errors
from falaj.ports.blobs import BlobKey

PART_BYTES = 32 << 20  # a bucket takes 10,000 parts: blobs up to 312 GiB
PARTS_IN_FLIGHT = 3
COPY_LIMIT_BYTES = 5 << 30  # the limit of S3 for one copy request


class BucketPublisher:
    """Of two writers of one key only one succeeds, because the bucket checks that the key is free.

    obstore cannot make a multipart upload conditional, but a copy inside the bucket: a large blob is staged and copied.
    Above 5 GiB no copy in one request is possible: the key is checked and the blob is uploaded again, and of two
    concurrent writers the later one wins.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def publish(self, key: BlobKey, chunks: Iterable[bytes]) -> int:
        counted = CountingChunks(chunks)
        opening = bytearray()
        for chunk in counted:
            opening += chunk
            if len(opening) > PART_BYTES:
                self._publish_large(key, bytes(opening), counted)
                return counted.size_bytes
        with translate_errors(key):
            obstore.put(self._store, key, bytes(opening), mode="create", use_multipart=False)
        return counted.size_bytes

    def _publish_large(self, key: BlobKey, opening: bytes, rest: CountingChunks) -> None:
        self._refuse_taken(key)
        staged = staging_name()
        try:
            self._upload(staged, chain([opening], rest))
            if rest.size_bytes <= COPY_LIMIT_BYTES:
                with translate_errors(key):
                    obstore.copy(self._store, staged, key, overwrite=False)
            else:
                self._refuse_taken(key)
                self._upload(key, self._parts(staged, rest.size_bytes))
        except errors.FalajError:
            if rest.failure:  # an error of `chunks` belongs to the caller, however obstore reports it
                raise rest.failure from None
            raise
        finally:
            with suppress(errors.FalajError), translate_errors(staged):
                obstore.delete(self._store, staged)

    def _upload(self, path: str, chunks: Iterator[bytes]) -> None:
        with translate_errors(path):
            obstore.put(
                self._store, path, prefetch(chunks), chunk_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT
            )

    def _parts(self, path: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, PART_BYTES):
            yield bytes(obstore.get_range(self._store, path, start=start, length=PART_BYTES))

    def _refuse_taken(self, key: BlobKey) -> None:
        with suppress(errors.NotFound), translate_errors(key):
            obstore.head(self._store, key)
            raise already_exists(key)


def prefetch(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same chunks, produced one ahead in another thread with the same context variables.

    obstore requests chunks inside its runtime, where a source that reads through obstore itself would panic.
    """
    context = copy_context()

    def following() -> bytes | None:
        return context.run(next, chunks, None)

    with ThreadPoolExecutor(max_workers=1) as thread:
        upcoming = thread.submit(following)
        while (chunk := upcoming.result()) is not None:
            upcoming = thread.submit(following)
            yield chunk


class CountingChunks:
    """Yields the same chunks, and records their size so far and the error that they raised."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self.size_bytes = 0
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            chunk = next(self._chunks)
        except StopIteration:
            raise
        except Exception as failure:
            self.failure = failure
            raise
        self.size_bytes += len(chunk)
        return chunk
