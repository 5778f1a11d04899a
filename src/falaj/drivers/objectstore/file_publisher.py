"""Publishing a blob in a local directory: written aside, made durable, then linked under its key."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from falaj import errors
from falaj.drivers.objectstore.publisher import STAGING, already_exists, staging_name
from falaj.ports.blobs import BlobKey

FLUSH_BYTES = 32 << 20  # the disk works while more is written, and the last fsync is short


class FilePublisher:
    """A blob is there when its link is, and a link is made only to a file whose bytes are on the disk.

    obstore's own local writes are not used: they do not call fsync, and cannot both stream and refuse to overwrite.
    """

    def __init__(self, directory: Path) -> None:
        self._root = directory
        with translate_disk_errors():
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._root / STAGING).mkdir(mode=0o700, exist_ok=True)

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
            with suppress(OSError):  # what cannot be removed now is left over
                staged.unlink()
        return size

    def _link(self, staged: Path, target: Path, key: BlobKey) -> None:
        try:
            make_directories(target.parent)
            os.link(staged, target)
        except (FileExistsError, NotADirectoryError):  # the key, or a part of its path, is another blob
            raise already_exists(key) from None
        sync_directory(target.parent)


@contextmanager
def translate_disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise errors.Unavailable(f"the blob store cannot be written: {fault}") from fault


def write_durably(path: Path, chunks: Iterable[bytes]) -> int:
    """Write `chunks` to the new file `path` and wait until the disk has them; the number of bytes."""
    size = flushed = 0
    flushing: Future[None] | None = None
    with translate_disk_errors():
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with closing_handle(handle), ThreadPoolExecutor(max_workers=1) as beside:
        for chunk in chunks:  # what `chunks` raises is the caller's, and stays as it is
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
    """Raise what a flush met: the system tells of a failed write only once, and fsync may come second."""
    if flushing is not None:
        flushing.result()


def make_directories(directory: Path) -> None:
    """Make `directory` and those above it, durably."""
    if directory.is_dir():
        return
    make_directories(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    with closing_handle(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as handle:
        os.fsync(handle)


@contextmanager
def closing_handle(handle: int) -> Iterator[int]:
    try:
        yield handle
    finally:
        os.close(handle)
