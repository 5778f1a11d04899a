"""Publishes a blob in a local directory: staged, flushed to disk, then linked under its key."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from falaj import errors
from falaj.drivers.fsync import make_directories, sync_directory
from falaj.drivers.objectstore.publisher import STAGING, already_exists, staging_name
from falaj.ports.blobs import BlobKey

FLUSH_BYTES = 32 << 20  # flushes overlap with writes, and the last fsync is short


class FilePublisher:
    """A blob exists once it is linked, and only a file whose bytes are on disk is linked.

    obstore's own local writes are not used: they do not call fsync, and cannot both stream and refuse to overwrite.
    """

    def __init__(self, directory: Path) -> None:
        self._root = directory
        with translate_disk_errors():
            make_directories(self._root / STAGING)

    def publish(self, key: BlobKey, chunks: Iterable[bytes]) -> int:
        target, staged = self._root / key, self._root / staging_name()
        with translate_disk_errors():
            if target.exists():
                raise already_exists(key)
        try:
            size = write_durably(staged, chunks)
            with translate_disk_errors():
                self._link(staged, target, key)
        finally:
            with suppress(OSError):  # deleted later as an incomplete write
                staged.unlink()
        return size

    def _link(self, staged: Path, target: Path, key: BlobKey) -> None:
        try:
            make_directories(target.parent, below=self._root)
            os.link(staged, target)
        except (FileExistsError, NotADirectoryError):  # the key, or a prefix of it, is another blob
            raise already_exists(key) from None
        sync_directory(target.parent)


@contextmanager
def translate_disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise errors.Unavailable(f"the blob store cannot be written: {fault}") from fault


def write_durably(path: Path, chunks: Iterable[bytes]) -> int:
    """Write `chunks` to the new file `path`, flush it to disk, and return the number of bytes."""
    size = flushed = 0
    flushing: Future[None] | None = None
    with translate_disk_errors():
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with closing_handle(handle), ThreadPoolExecutor(max_workers=1) as beside:
        for chunk in chunks:  # an error of `chunks` is passed to the caller unchanged
            with translate_disk_errors():
                size += write_all(handle, chunk)
                if size - flushed >= FLUSH_BYTES and (flushing is None or flushing.done()):
                    raise_flush_error(flushing)
                    flushed, flushing = size, beside.submit(os.fsync, handle)
        with translate_disk_errors():
            raise_flush_error(flushing)
            os.fsync(handle)
    return size


def write_all(handle: int, chunk: bytes) -> int:
    rest = memoryview(chunk)
    while len(rest):
        rest = rest[os.write(handle, rest) :]
    return len(chunk)


def raise_flush_error(flushing: Future[None] | None) -> None:
    """Raise the error of a flush: the system reports a failed write only once, so a later fsync may succeed."""
    if flushing is not None:
        flushing.result()


@contextmanager
def closing_handle(handle: int) -> Iterator[int]:
    try:
        yield handle
    finally:
        os.close(handle)
