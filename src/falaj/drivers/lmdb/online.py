"""The online store in LMDB: one memory-mapped file, shared by all processes of the platform."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from falaj.drivers.fsync import make_directories, sync_directory
from falaj.drivers.lmdb import records
from falaj.drivers.lmdb.pages import check_pages
from falaj.errors import Unavailable
from falaj.ports.online import ArrowBatch, EntityKey, ViewName

R = TypeVar("R")

MAP_BYTES = 64 << 20
BATCH_ROWS = 10_000
"""Rows per transaction, which bounds how long writers of other processes wait."""

DAMAGES = (
    lmdb.BadDbiError,
    lmdb.BadTxnError,
    lmdb.BadValsizeError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.ProblemError,
    lmdb.VersionMismatchError,
)
"""What LMDB raises when it reads pages that it did not write."""


class LmdbOnlineStore:
    """An OnlineStore of checked records. The map is doubled when it is full."""

    def __init__(self, path: Path, *, map_bytes: int = MAP_BYTES) -> None:
        self._shared = _open_shared(path, map_bytes)
        self._longest = self._shared.environment.max_key_size()

    def write(self, view: ViewName, rows: ArrowBatch) -> int:
        keys = [self._key(view, key) for key in rows.column("key").to_pylist()]
        times = rows.column("event_time").to_pylist()
        values = rows.column("value").to_pylist()
        self._shared.retried(partial(self._mark, view))
        written = 0
        ordered = sorted(zip(keys, times, values, strict=True), key=itemgetter(0))
        for start in range(0, len(ordered), BATCH_ROWS):
            written += self._shared.retried(partial(self._put, ordered[start : start + BATCH_ROWS]))
        self._shared.retried(self._flush)
        return written

    def read(self, view: ViewName, keys: Sequence[EntityKey]) -> list[bytes | None]:
        stored = [self._key(view, key) for key in keys]
        return self._shared.retried(lambda: self._get(view, stored))

    def check(self) -> None:
        self._shared.retried(self._check)

    def close(self) -> None:
        self._shared.release()

    def _mark(self, view: ViewName) -> None:
        """Record that the view has been written, so that a file without its values is known to be damaged."""
        with self._shared.using() as environment:
            with environment.begin(buffers=True) as transaction:
                if records.get(transaction, view.encode()) is not None:
                    return
            with environment.begin(write=True, buffers=True) as transaction:
                records.put(transaction, [(view.encode(), 0, b"")])

    def _put(self, rows: list[tuple[bytes, int, bytes]]) -> int:
        with self._shared.using() as environment, environment.begin(write=True, buffers=True) as transaction:
            return records.put(transaction, rows)

    def _get(self, view: ViewName, keys: list[bytes]) -> list[bytes | None]:
        with self._shared.using() as environment, environment.begin(buffers=True) as transaction:
            found = [records.get(transaction, key) for key in keys]
            if None in found:
                _require_view(transaction, view)
        return [None if record is None else record.value for record in found]

    def _check(self) -> None:
        with self._shared.using() as environment, environment.begin(buffers=True) as transaction:
            records.check(transaction)

    def _flush(self) -> None:
        with self._shared.using() as environment:
            environment.sync(True)

    def _key(self, view: ViewName, key: bytes) -> bytes:
        plain = view.encode() + b"\0" + key
        return plain if len(plain) <= self._longest else hashlib.sha256(plain).digest()


def _require_view(transaction: Any, view: ViewName) -> None:
    """Raise Damaged if `view` was never written to this file."""
    if records.get(transaction, view.encode()) is None:
        raise records.damaged(f"no values of view {view}: the file was lost or replaced")


class _SharedEnvironment:
    """The one environment that a process may open on a file. The map is resized only while nobody uses it."""

    def __init__(self, path: Path, map_bytes: int) -> None:
        make_directories(path.parent)
        self.path = path
        self.holders = 0
        with _translate_errors():
            self.environment: Any = lmdb.open(
                str(path), subdir=False, map_size=map_bytes, metasync=False, max_readers=512, mode=0o600
            )
        self._users = 0
        self._resizing = False
        self._changed = threading.Condition()
        try:
            self._require_whole()
            with _translate_errors():
                check_pages(path, self.environment)
                self._extend()
            self.retried(self._begin)
        except BaseException:
            self.environment.close()
            raise

    def retried(self, work: Callable[[], R]) -> R:
        """Run `work`; retry it with a larger map if the map was full, or if another process resized it.

        A reader that was killed keeps its slot, and all pages that were replaced since: those are freed first.
        """
        while True:
            try:
                with _translate_errors():
                    return work()
            except lmdb.MapFullError:
                if not self.environment.reader_check():
                    self._resize(factor=2)
            except lmdb.MapResizedError:
                self._resize(factor=0)
            except lmdb.ReadersFullError as error:
                if not self.environment.reader_check():
                    raise Unavailable(f"the online store has too many readers: {error}") from error

    def _require_whole(self) -> None:
        """Raise Damaged if the file ends before its last page: reading beyond the end would kill the process."""
        pages = self.environment.info()["last_pgno"] + 1
        expected, found = pages * self.environment.stat()["psize"], self.path.stat().st_size
        if found < expected:
            raise records.damaged(f"a file of {found} bytes instead of {expected}")

    def _extend(self) -> None:
        """Let the file be as long as its map, without using disk: a damaged page may point behind the last one."""
        size_bytes = self.environment.info()["map_size"]
        if self.path.stat().st_size < size_bytes:
            with self.environment.begin(write=True):  # nobody else extends it
                if self.path.stat().st_size < size_bytes:
                    os.truncate(self.path, size_bytes)

    def _begin(self) -> None:
        with self.using() as environment:
            with environment.begin(buffers=True) as transaction:
                if transaction.get(records.HEAD) is not None:
                    return
            with environment.begin(write=True, buffers=True) as transaction:
                records.begin(transaction)
            environment.sync(True)
        sync_directory(self.path.parent)

    @contextmanager
    def using(self) -> Iterator[Any]:
        with self._changed:
            while self._resizing:
                self._changed.wait()
            self._users += 1
        try:
            yield self.environment
        finally:
            with self._changed:
                self._users -= 1
                if self._resizing and not self._users:
                    self._changed.notify_all()

    def _resize(self, *, factor: int) -> None:
        """Grow the map by `factor`; 0 adopts the size of the file. New users wait until current ones have finished."""
        with self._changed:
            while self._resizing:
                self._changed.wait()
            self._resizing = True
            try:
                self._changed.wait_for(lambda: not self._users)
                self.environment.set_mapsize(factor * self.environment.info()["map_size"])
                self._extend()
            finally:
                self._resizing = False
                self._changed.notify_all()

    def release(self) -> None:
        with _lock:
            self.holders -= 1
            if self.holders == 0:
                _open.pop(self.path, None)
                self.environment.close()


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (lmdb.MapFullError, lmdb.MapResizedError, lmdb.ReadersFullError):
        raise
    except DAMAGES as error:
        raise records.damaged(str(error)) from error
    except lmdb.Error as error:
        raise Unavailable(f"the online store cannot be used: {error}") from error


_open: dict[Path, _SharedEnvironment] = {}
_lock = threading.Lock()


def _open_shared(path: Path, map_bytes: int) -> _SharedEnvironment:
    path = path.absolute()
    with _lock:
        shared = _open.get(path)
        if shared is None:
            shared = _open[path] = _SharedEnvironment(path, map_bytes)
        shared.holders += 1
        return shared
