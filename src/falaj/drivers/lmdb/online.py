"""The online store in LMDB: one memory-mapped file, shared by all processes of the platform."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from falaj.ports.online import ArrowBatch, EntityKey, ViewName

R = TypeVar("R")

MAP_BYTES = 64 << 20
BATCH_ROWS = 10_000
"""Rows per transaction, which bounds how long writers of other processes wait."""

_TIME = struct.Struct("<q")


class LmdbOnlineStore:
    """An OnlineStore. A value is stored after its event time (8 bytes). The map is doubled when it is full."""

    def __init__(self, path: Path, *, map_bytes: int = MAP_BYTES) -> None:
        self._shared = _open_shared(path, map_bytes)
        self._longest = self._shared.environment.max_key_size()

    def write(self, view: ViewName, rows: ArrowBatch) -> int:
        keys = rows.column("key").to_pylist()
        times = rows.column("event_time").to_pylist()
        values = rows.column("value").to_pylist()
        written = 0
        for start in range(0, len(keys), BATCH_ROWS):
            part = slice(start, start + BATCH_ROWS)
            batch = list(zip(keys[part], times[part], values[part], strict=True))
            written += self._shared.retried(partial(self._put, view, batch))
        return written

    def read(self, view: ViewName, keys: Sequence[EntityKey]) -> list[bytes | None]:
        stored = [self._key(view, key) for key in keys]
        return self._shared.retried(lambda: self._get(stored))

    def close(self) -> None:
        self._shared.release()

    def _put(self, view: ViewName, rows: list[tuple[bytes, int, bytes]]) -> int:
        written = 0
        with self._shared.using() as environment, environment.begin(write=True) as transaction:
            for key, time, value in rows:
                at = self._key(view, key)
                before = transaction.get(at)
                if before is None or _TIME.unpack_from(before)[0] <= time:
                    transaction.put(at, _TIME.pack(time) + value)
                    written += 1
        return written

    def _get(self, keys: list[bytes]) -> list[bytes | None]:
        with self._shared.using() as environment, environment.begin(buffers=True) as transaction:
            found = (transaction.get(key) for key in keys)
            return [None if value is None else bytes(value[_TIME.size :]) for value in found]

    def _key(self, view: ViewName, key: bytes) -> bytes:
        plain = view.encode() + b"\0" + key
        return plain if len(plain) <= self._longest else hashlib.sha256(plain).digest()


class _SharedEnvironment:
    """The one environment that a process may open on a file. The map is resized only while nobody uses it."""

    def __init__(self, path: Path, map_bytes: int) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self.holders = 0
        self.environment: Any = lmdb.open(
            str(path), subdir=False, map_size=map_bytes, metasync=False, max_readers=512, mode=0o600
        )
        self._users = 0
        self._resizing = False
        self._changed = threading.Condition()

    def retried(self, work: Callable[[], R]) -> R:
        """Run `work`; retry it with a larger map if the map was full, or if another process resized it."""
        while True:
            try:
                return work()
            except lmdb.MapFullError:
                self._resize(factor=2)
            except lmdb.MapResizedError:
                self._resize(factor=0)

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
            finally:
                self._resizing = False
                self._changed.notify_all()

    def release(self) -> None:
        with _lock:
            self.holders -= 1
            if self.holders == 0:
                _open.pop(self.path, None)
                self.environment.close()


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
